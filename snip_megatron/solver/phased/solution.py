"""What the solver hands back for the phases of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.solver.solution import Infeasibility, Solution, relative_gap


@dataclass(frozen=True)
class PhasedSolution:
    """The outcome of one solve over phases.

    Attributes:
        phases: a ``Solution`` a phase: its choices, loss and figures of one step. Its objective is the phase's loss,
            its target the budget over all phases. Empty when infeasible.
        steps: number of training steps of every phase.
        status, target, kind, fault, solve_seconds, deterministic_seconds: as of a ``Solution``.
        objective: what was minimised: Σ loss over all phases, or the Σ of steps times the slowest stage's time for a
            budget of kind ``loss``. None when infeasible.
        bound: no feasible choices have a smaller objective.
        achieved: the average over all steps, those spent included: Σ saving / Σ cost of a step for a ``target``, the
            reference time over the time taken otherwise.
        effective: what every phase counts with towards the target: the smaller of its share over everything and its
            stages' shares plus the tolerance; for budgets of time the share of the reference that is saved.
        loss: Σ loss over all phases.
    """

    phases: tuple[Solution, ...]
    steps: tuple[int, ...]
    status: str
    target: float
    kind: str
    objective: float | None = None
    bound: float | None = None
    achieved: float | None = None
    effective: tuple[float, ...] = ()
    loss: float | None = None
    solve_seconds: float = 0.0
    deterministic_seconds: float = 0.0
    fault: Infeasibility | None = None

    @property
    def gap(self) -> float | None:
        """(objective − bound) relative to the larger magnitude; 0 when both are equal, None when infeasible."""
        return relative_gap(self.objective, self.bound)

    def to_plan(self, begins: Sequence[int] | None = None, version: int = 0) -> PrecisionPlan:
        """The choices as a plan. Raises SnipError where the phases' first steps and lengths do not fit.

        Args:
            begins: first step of every phase; by default the steps are counted from 0.
            version: number of the plan and of its maps.
        """
        counted = [0, *itertools.accumulate(self.steps)]
        begins = counted[:-1] if begins is None else begins
        return PrecisionPlan(
            phases=tuple(
                PlanPhase(begin, phase.to_precision_map(version))
                for begin, phase in zip(begins, self.phases, strict=True)
            ),
            last=begins[-1] + self.steps[-1],
            version=version,
            status=self.status,
            objective=self.objective,
            bound=self.bound,
            target=self.target,
            achieved=self.achieved,
        )
