"""What the solver hands back: the choices, how good they are, and how that is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from snip_megatron.precision import Format, PrecisionMap


@dataclass(frozen=True)
class Infeasibility:
    """Why nothing meets the budget.

    Attributes:
        why: one line. stage: the stage at fault, or that can save the least; None for a budget of kind ``loss``.
        reachable: the highest feasible target or speedup, the smallest feasible loss; None when there is none.
    """

    why: str
    stage: int | None
    reachable: float | None

    def __str__(self) -> str:
        return f"infeasible: {self.why}"


@dataclass(frozen=True)
class Solution:
    """The outcome of one solve.

    Attributes:
        choices: format by item id, in the order of the problem's items; empty when infeasible.
        status: ``optimal`` (proven), ``feasible`` (meets the budget, ``bound`` says how good) or ``infeasible``.
        target: the figure that the budget asks for: a share, a speedup or a loss.
        kind: the budget's kind: ``target``, ``speedup`` or ``loss``.
        objective: what was minimised, in float64 of the problem's own numbers: Σ loss (with the penalties of changed
            choices, if any), or the slowest stage's time for a budget of kind ``loss``. None when infeasible.
        bound: no feasible choices have a smaller objective; equals it when optimal, up to rounding.
        achieved: Σ saving / Σ cost; 0 when everything costs nothing. achieved_per_stage: the same by stage number.
        loss: Σ loss of the choices as given, without penalties.
        speedup: reference time / time of the slowest stage; None for a budget of kind ``target``.
        solve_seconds: wall time of the solve.
        deterministic_seconds: CP-SAT's own measure of its work, the same on every machine.
        fault: why it is infeasible; None otherwise.
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
        """(objective − bound) relative to the objective's magnitude; 0 when both are equal, None when infeasible."""
        if self.objective is None or self.bound is None:
            return None
        distance = max(0.0, self.objective - self.bound)
        return 0.0 if distance == 0.0 else distance / max(abs(self.objective), abs(self.bound))

    @property
    def finite_speedup(self) -> float | None:
        """``speedup`` for a JSON file: None also where no time is left at all."""
        return None if self.speedup is None or not math.isfinite(self.speedup) else self.speedup

    def to_precision_map(self, version: int = 0) -> PrecisionMap:
        """The choices as a map with these figures; names are checked where the map is loaded, not here."""
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
        """The text of a ``snip.map/1`` file; with ``budget``, ``loss`` and ``speedup`` where it was not a target."""
        return self.to_precision_map(version).to_json()


def saved_share(saved: float, cost: float) -> float:
    """Return the share of ``cost`` that is saved; 0 where everything costs nothing."""
    return saved / cost if cost > 0 else 0.0


def speedup_of(reference: float, time: float) -> float:
    """Return reference over time; 1 where both are nothing."""
    if time > 0:
        return reference / time
    return 1.0 if reference == 0 else math.inf
