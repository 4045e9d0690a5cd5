"""The result of a solve: the choices with their objective and its bound, or why no choices meet the budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.budget import MAX_SPEEDUP, Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.table import Floats, Table

_DIGITS = 1e9  # reachable values are rounded so that a budget of the printed value can be met


@dataclass(frozen=True)
class Infeasibility:
    """Why a budget cannot be met."""

    why: str  # the reason in one line
    # the stage that limits the budget, or that can save the least. None for a budget of kind ``loss``
    stage: int | None
    # the highest feasible target or speedup, or the smallest feasible loss. None if there is none
    reachable: float | None

    def __str__(self) -> str:
        return f"infeasible: {self.why}"


@dataclass(frozen=True)
class Solution:
    """The result of one solve: of one map, or of a plan whose ``phases`` each hold a map."""

    # item id → format, in the order of the problem's items; empty for a plan and if infeasible
    choices: Mapping[str, Format]
    status: str  # ``optimal`` (``gap`` is at most 1e-4), ``feasible`` or ``infeasible``
    budget: Budget
    # objective, bound: what was minimised, and a lower bound of it over all feasible choices. Minimised is Σ loss, or
    # under a budget ``loss`` the time of the slowest stage (for a plan Σ steps · time)
    objective: float | None = None
    bound: float | None = None
    # certified: (objective − bound) / (objective − Σ of each decision's least loss). Under a budget ``loss`` it is
    # (objective − bound) / objective
    gap: float | None = None
    # Σ saving / Σ cost; 0 if all costs are 0. For a plan it is the mean over all steps, those spent included, or
    # reference time / time under budgets of time
    achieved: float | None = None
    # the same for each stage number; empty for a plan
    achieved_per_stage: Mapping[int, float] = field(default_factory=dict)
    loss: float | None = None  # Σ loss
    speedup: float | None = None  # reference time / time of the slowest stage. None under ``fp4`` and for a plan
    solve_seconds: float = 0.0
    deterministic_seconds: float = 0.0  # CP-SAT's own measure of its work, which is the same on every machine
    fault: Infeasibility | None = None
    # phases, steps: the solution of every phase of a plan, in figures of one step, and the training steps of every
    # phase
    phases: tuple[Solution, ...] = ()
    steps: tuple[int, ...] = ()

    def met(self, request: str, advice: str = "") -> Solution:
        """Return this solution. Raises SnipError (exit code 3), which names the ``request``, if it is infeasible."""
        if self.fault is not None:
            raise SnipError(f"{request}: {self.fault}{advice}", exit_code=3)
        return self

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
            speedup=self.speedup if self.speedup is not None and math.isfinite(self.speedup) else None,  # for JSON
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


# -- no solution -------------------------------------------------------------------------------------------------
def infeasibility(problem: Problem) -> Infeasibility | None:
    """Return why no choices meet the budget, or None if some do.

    What can be reached follows from the choices that save most, or under ``loss`` from those of the least loss.
    """
    table = Table.build(problem)
    if problem.budget.kind == "loss":
        if table.least <= problem.budget.value:
            return None
        return Infeasibility(f"the smallest reachable loss is {table.least:.17g}", None, table.least)
    fastest = table.fastest_assignment()
    return None if table.is_feasible(fastest) else _explained(problem, table, table.savings(fastest))


def _explained(problem: Problem, table: Table, savings: Floats) -> Infeasibility:
    """Return why even the largest savings [P, K + 1] do not meet the budget."""
    phase_saving, limit = table.phase_saving(savings), _highest_budget(problem, table)
    lowest, why = _lowest(problem, table, savings[0])
    what = "target" if problem.budget.kind == "fp4" else problem.budget.kind
    if not problem.phases:
        if limit is None:
            return Infeasibility(f"{why}; no {what} is reachable", lowest, None)
        return Infeasibility(f"{why}; the highest reachable {what} is {limit:.12g}", lowest, limit)
    for p, (reached, floor) in enumerate(zip(phase_saving.tolist(), table.floor.tolist(), strict=True)):
        if reached < floor:
            if problem.budget.kind == "speedup":
                reached = 1 / (1 - reached) if reached < 1 else math.inf
            shown = math.floor(min(reached, _DIGITS) * _DIGITS) / _DIGITS
            return Infeasibility(
                f"phase {p} reaches at most {shown:.9g} (lowest stage: {lowest}), less than its own target of"
                f" {problem.phases[p].target:g}",
                lowest,
                None,
            )
    spent = "" if problem.spent is None else f" after {problem.spent.steps} steps at {problem.spent.achieved:.6g}"
    if limit is None:
        return Infeasibility(f"no {what} over the whole run is reachable{spent}", lowest, None)
    why = f"the highest reachable {what} over the whole run is {limit:.12g}"
    return Infeasibility(f"{why}{spent} (lowest stage: {lowest})", lowest, limit)


def _lowest(problem: Problem, table: Table, savings: Floats) -> tuple[int, str]:
    """Return the stage that saves the least and what it reaches in words, from the savings of a step, [K + 1]."""
    values = savings / table.rows.divisor + table.rows.offset
    if problem.budget.kind == "speedup":
        rows = table.rows
        times = dict(problem.fixed_cost) | {
            stage: rows.reference - float(value) * (rows.reference or 1.0)
            for stage, value in zip(table.stages, values[1:], strict=True)
        }
        slowest = max(times, key=lambda stage: (times[stage], -stage))
        return slowest, f"stage {slowest} costs at least {times[slowest]:.6g}"
    cost = table.cost[1:]
    shares = np.where(cost > 0, savings[1:] / np.where(cost > 0, cost, 1.0), np.where(savings[1:] < 0, -np.inf, np.inf))
    at = int(shares.argmin())
    why = f"stage {table.stages[at]} saves at most {shares[at]:.6g} of its cost"
    by_stage = table.rows.hard[1 + at] or (table.rows.counted[1 + at] and values[1 + at] < values[0])
    return table.stages[at], why if by_stage else f"all stages together save too little (lowest: {why})"


def _highest_budget(problem: Problem, table: Table) -> float | None:
    """Return the highest budget that the fastest assignment meets, rounded down. None if it meets none."""
    fastest, steps, (past_steps, achieved) = table.fastest_assignment(), problem.steps, problem.past
    saved = table.total_saving(fastest)
    if problem.budget.kind == "fp4":
        limit, least, highest = math.fsum([saved, past_steps * achieved]) / steps, 0.0, 1.0
    else:
        taken = math.fsum([steps - past_steps, -saved, past_steps / achieved])
        limit, least, highest = steps / taken if taken > 0 else MAX_SPEEDUP, 1.0, MAX_SPEEDUP
    limit = math.floor(min(limit, highest) * _DIGITS) / _DIGITS
    for tried in (limit, max(limit - 1 / _DIGITS, least), max(limit - 2 / _DIGITS, least)):
        if limit >= least and Table.build(problem.at(tried)).is_feasible(fastest):
            return tried
    return None
