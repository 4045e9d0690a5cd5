"""The result of a solve: the choices, the objective with its bound, and what was proven."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from snip_megatron.precision import Format, PrecisionMap


@dataclass(frozen=True)
class Infeasibility:
    """The reason why a budget cannot be met.

    Attributes:
        why: one line.
        stage: the stage that limits the budget, or the one that can save the least; None for a budget of kind ``loss``.
        reachable: the highest feasible target or speedup, or the smallest feasible loss; None if there is none.
    """

    why: str
    stage: int | None
    reachable: float | None

    def __str__(self) -> str:
        return f"infeasible: {self.why}"


@dataclass(frozen=True)
class Solution:
    """The result of one solve.

    Attributes:
        choices: item id → format, in the order of the problem's items; empty if infeasible.
        status: ``optimal`` (proven), ``feasible`` (meets the budget; ``bound`` says how good it is) or ``infeasible``.
        target: the value of the budget: a share, a speedup or a loss.
        kind: the kind of the budget: ``target``, ``speedup`` or ``loss``.
        objective: what was minimised, computed in float64 from the numbers of the problem: Σ loss with the penalties of
            changed choices, or for a budget of kind ``loss`` the time of the slowest stage. None if infeasible.
        bound: lower bound of the objective over all feasible choices. If optimal, it equals the objective up to
            rounding.
        achieved: Σ saving / Σ cost; 0 if all costs are 0.
        achieved_per_stage: the same for each stage number.
        loss: Σ loss of the choices as given, without penalties.
        speedup: reference time / time of the slowest stage; None for a budget of kind ``target``.
        solve_seconds: wall-clock time of the solve.
        deterministic_seconds: CP-SAT's own measure of its work, which is the same on every machine.
        fault: the reason of an infeasible budget, otherwise None.
    """

    choices: Mapping[str, Format]
    status: str
    target: float
    objective: float | None = None
    bound: float | None = None
    achieved: float | None = None
    achieved_per_stage: Mapping[int, float] = field(default_factory=dict)
    loss: float | None = None
    speedup: float | None = None
    solve_seconds: float = 0.0
    deterministic_seconds: float = 0.0
    fault: Infeasibility | None = None
    kind: str = "target"

    @property
    def gap(self) -> float | None:
        """(objective − bound) / max(|objective|, |bound|); 0 if both are equal, None if infeasible."""
        return relative_gap(self.objective, self.bound)

    @property
    def finite_speedup(self) -> float | None:
        """``speedup`` for a JSON file: None also if it is infinite."""
        return None if self.speedup is None or not math.isfinite(self.speedup) else self.speedup

    def to_precision_map(self, version: int = 0) -> PrecisionMap:
        """Return the choices as a map with these figures. Names are not checked here, but when the map is loaded."""
        timed = self.kind != "target"
        return PrecisionMap(
            choices=self.choices,
            version=version,
            status=self.status,
            objective=self.objective,
            bound=self.bound,
            target=self.target,
            achieved=self.achieved,
            achieved_per_stage={str(stage): share for stage, share in self.achieved_per_stage.items()},
            solve_seconds=self.solve_seconds,
            budget=self.kind if timed else None,
            loss=self.loss if timed else None,
            speedup=self.finite_speedup,
        )

    def to_map_json(self, version: int = 0) -> str:
        """Return the text of a ``snip.map/1`` file. ``budget``, ``loss`` and ``speedup`` are left out for a target."""
        return self.to_precision_map(version).to_json()


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """Return (objective − bound) / max(|objective|, |bound|); 0 if both are equal, None if one is None."""
    if objective is None or bound is None:
        return None
    distance = max(0.0, objective - bound)
    return 0.0 if distance == 0.0 else distance / max(abs(objective), abs(bound))


def saved_share(saved: float, cost: float) -> float:
    """Return the share of ``cost`` that is saved; 0 if the cost is 0."""
    return saved / cost if cost > 0 else 0.0


def speedup_of(reference: float, time: float) -> float:
    """Return reference / time; 1 if both are 0."""
    if time > 0:
        return reference / time
    return 1.0 if reference == 0 else math.inf
