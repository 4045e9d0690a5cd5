"""What the solver hands back: the choices, how good they are, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from snip_megatron.precision import Format, PrecisionMap


@dataclass(frozen=True)
class Infeasibility:
    """Why nothing meets the budget.

    Attributes:
        stage: the stage that can save the smallest share of its cost. stage_reach: that share.
        by_stage: whether that stage's own constraint limits the target; otherwise the total does.
        reachable_target: the highest target that is feasible; None when none is.
    """

    stage: int
    stage_reach: float
    by_stage: bool
    reachable_target: float | None

    def __str__(self) -> str:
        lowest = f"stage {self.stage} saves at most {self.stage_reach:.6g} of its cost"
        why = lowest if self.by_stage else f"all stages together save too little ({lowest})"
        if self.reachable_target is None:
            return f"infeasible: {why}; no target is reachable"
        return f"infeasible: {why}; the highest reachable target is {self.reachable_target:.9g}"


@dataclass(frozen=True)
class Solution:
    """The outcome of one solve.

    Attributes:
        choices: format by item id, in the order of the problem's items; empty when infeasible.
        status: ``optimal`` (proven), ``feasible`` (meets the budget, ``bound`` says how good) or ``infeasible``.
        objective: Σ loss of the choices as given, in float64; None when infeasible.
        bound: no feasible choices have a smaller Σ loss; equals ``objective`` when optimal, up to rounding.
        target: the share asked for.
        achieved: Σ saving / Σ cost; 0 when everything costs nothing. achieved_per_stage: the same by stage number.
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
    solve_seconds: float = 0.0
    deterministic_seconds: float = 0.0
    fault: Infeasibility | None = None

    @property
    def gap(self) -> float | None:
        """(objective − bound) relative to the objective's magnitude; 0 when both are equal, None when infeasible."""
        if self.objective is None or self.bound is None:
            return None
        distance = max(0.0, self.objective - self.bound)
        return 0.0 if distance == 0.0 else distance / max(abs(self.objective), abs(self.bound))

    def to_precision_map(self, version: int = 0) -> PrecisionMap:
        """The choices as a map with these figures; names are checked where the map is loaded, not here."""
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
        )

    def to_map_json(self, version: int = 0) -> str:
        """The text of a ``snip.map/1`` file."""
        return self.to_precision_map(version).to_json()
