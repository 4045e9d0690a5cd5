"""The result of a solve: the choices, the objective with its bound, and what was proven."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan


@dataclass(frozen=True)
class Infeasibility:
    """Why a budget cannot be met, in one line; the stage that limits it, or that can save the least, None for a budget
    of kind ``loss``; and the highest feasible target or speedup, or the smallest feasible loss, None if there is none.
    """

    why: str
    stage: int | None
    reachable: float | None

    def __str__(self) -> str:
        return f"infeasible: {self.why}"


@dataclass(frozen=True)
class Solution:
    """The result of one solve: of one map, or of a plan whose ``phases`` each hold a map.

    Attributes:
        choices: item id → format, in the order of the problem's items; empty for a plan and if infeasible.
        status: ``optimal`` (``gap`` is at most 1e-4), ``feasible`` or ``infeasible``.
        objective, bound: what was minimised, Σ loss, or for ``loss`` the time of the slowest stage, of a plan Σ steps ·
            time; and a lower bound of it over all feasible choices.
        gap: certified: (objective − bound) / (objective − Σ of each decision's least loss), or for ``loss`` (objective
            − bound) / objective.
        achieved: Σ saving / Σ cost; 0 if all costs are 0. Of a plan the mean over all steps, those spent included, or
            for budgets of time reference time / time.
        achieved_per_stage: the same for each stage number; empty for a plan.
        loss, speedup: Σ loss; reference time / time of the slowest stage, None under ``fp4`` and for a plan.
        deterministic_seconds: CP-SAT's own measure of its work, which is the same on every machine.
        phases, steps: of a plan, the solution of every phase, in figures of one step, and its training steps.
    """

    choices: Mapping[str, Format]
    status: str
    budget: Budget
    objective: float | None = None
    bound: float | None = None
    gap: float | None = None
    achieved: float | None = None
    achieved_per_stage: Mapping[int, float] = field(default_factory=dict)
    loss: float | None = None
    speedup: float | None = None
    solve_seconds: float = 0.0
    deterministic_seconds: float = 0.0
    fault: Infeasibility | None = None
    phases: tuple[Solution, ...] = ()
    steps: tuple[int, ...] = ()

    def met(self, asked: str, advice: str = "") -> Solution:
        """Return this solution. Raises SnipError (exit code 3) that names what was ``asked`` if nothing meets it."""
        if self.fault is not None:
            raise SnipError(f"{asked}: {self.fault}{advice}", exit_code=3)
        return self

    @property
    def finite_speedup(self) -> float | None:
        """``speedup`` for a JSON file: None also if it is infinite."""
        return None if self.speedup is None or not math.isfinite(self.speedup) else self.speedup

    def to_precision_map(self, version: int = 0) -> PrecisionMap:
        """Return the choices as a map with these figures. Names are not checked here, but when the map is loaded."""
        timed = self.budget.timed
        return PrecisionMap(
            choices=self.choices,
            version=version,
            status=self.status,
            objective=self.objective,
            bound=self.bound,
            target=self.budget.value,
            achieved=self.achieved,
            achieved_per_stage={str(stage): share for stage, share in self.achieved_per_stage.items()},
            solve_seconds=self.solve_seconds,
            budget=self.budget.kind if timed else None,
            loss=self.loss if timed else None,
            speedup=self.finite_speedup,
        )

    def to_plan(self, begins: Sequence[int] | None = None, version: int = 0) -> PrecisionPlan:
        """Return the phases as a plan, whose first steps are ``begins``, or are counted from 0.

        Raises SnipError if first steps and lengths do not fit.
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
            target=self.budget.value,
            achieved=self.achieved,
        )
