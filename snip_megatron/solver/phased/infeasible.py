"""Why nothing meets a budget over phases, in words a user can act on, and what can be reached."""

from __future__ import annotations

import math
from dataclasses import replace

from snip_megatron.precision.budget import MAX_SPEEDUP
from snip_megatron.solver.phased.build import Costs, build_table
from snip_megatron.solver.phased.problem import PhasedProblem
from snip_megatron.solver.phased.table import PhasedTable
from snip_megatron.solver.solution import Infeasibility

_DIGITS = 1e9  # figures are rounded to the side where asking for them succeeds


def why_infeasible(table: PhasedTable, problem: PhasedProblem) -> Infeasibility:
    """For an infeasible budget. Saving the most, or losing the least, on every item is what can be reached."""
    if problem.budget.kind == "loss":
        least = math.fsum(table.true_loss.min(axis=1))
        return Infeasibility(f"the smallest reachable loss is {least:.17g}", None, least)
    most = table.most_saving()
    worth = table.worth(most)
    savings = table.savings(most)
    stages = savings[0, 1:] / [cost or math.inf for cost in Costs(problem, table.stages).stage]
    lowest = table.stages[int(stages.argmin())]
    for p, (reached, floor) in enumerate(zip(worth.tolist(), table.floor.tolist(), strict=True)):
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
    limit = _limit(table, problem, table.average(worth))
    spent = "" if problem.spent is None else f" after {problem.spent.steps} steps at {problem.spent.achieved:.6g}"
    what = "speedup" if problem.budget.kind == "speedup" else "target"
    if limit is None:
        return Infeasibility(f"no {what} over the whole run is reachable{spent}", lowest, None)
    why = f"the highest reachable {what} over the whole run is {limit:.12g}{spent} (lowest stage: {lowest})"
    return Infeasibility(why, lowest, limit)


def _limit(table: PhasedTable, problem: PhasedProblem, worth: float) -> float | None:
    """The highest figure that the picks which save most meet, rounded down."""
    spent, steps = problem.spent, problem.steps
    done, achieved = (0, 1.0) if spent is None or not spent.steps else (spent.steps, spent.achieved)
    if problem.budget.kind == "target":
        limit, least, most = math.fsum([worth, done * achieved]) / steps, 0.0, 1.0
    else:
        costs = Costs(problem, table.stages)
        taken = math.fsum([costs.reference * sum(table.steps), -costs.unit * worth, done * costs.reference / achieved])
        limit, least, most = costs.reference * steps / taken if taken > 0 else 1.0, 1.0, MAX_SPEEDUP
    limit = min(math.floor(limit * _DIGITS) / _DIGITS, most)
    for _ in range(3):
        if limit < least:
            return None
        if _reached(problem, limit):
            return limit
        limit -= 1 / _DIGITS
    return None


def _reached(problem: PhasedProblem, limit: float) -> bool:
    table = build_table(replace(problem, budget=problem.budget.with_wanted(limit)))
    return table.feasible(table.most_saving())
