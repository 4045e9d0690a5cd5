"""Explains why a budget cannot be met: which stage or phase limits it, and what can be reached."""

import math

import numpy as np

from snip_megatron.precision.budget import MAX_SPEEDUP
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.solution import Infeasibility
from snip_megatron.solver.table import Floats, Table

_DIGITS = 1e9  # reachable values are rounded so that a budget of the printed value can be met


def infeasibility(problem: Problem) -> Infeasibility | None:
    """Return why no choices meet the budget, or None if some do.

    The limit follows from the choices that save most on every item, or under ``loss`` from those of the least loss.
    """
    table = Table.build(problem)
    if problem.budget.kind == "loss":
        if table.least <= problem.budget.value:
            return None
        return Infeasibility(f"the smallest reachable loss is {table.least:.17g}", None, table.least)
    most = table.fastest_assignment()
    return None if table.is_feasible(most) else _why(problem, table, table.savings(most))


def _why(problem: Problem, table: Table, savings: Floats) -> Infeasibility:
    phase_saving, limit = table.phase_saving(savings), _limit(problem, table)
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
    """Return the stage that saves the least, and what it reaches in words, from the savings of a step [K + 1]."""
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


def _limit(problem: Problem, table: Table) -> float | None:
    """Return the highest budget that the assignment that saves most meet, rounded down; None if they meet none."""
    most, spent, steps = table.fastest_assignment(), problem.spent, problem.steps
    done, achieved = (0, 1.0) if spent is None else (spent.steps, spent.achieved)
    phase_saving = table.over_steps(table.phase_saving(table.savings(most)))
    if problem.budget.kind == "fp4":
        limit, least, highest = math.fsum([phase_saving, done * achieved]) / steps, 0.0, 1.0
    else:
        taken = math.fsum([steps - done, -phase_saving, done / achieved])
        limit, least, highest = steps / taken if taken > 0 else MAX_SPEEDUP, 1.0, MAX_SPEEDUP
    limit = math.floor(min(limit, highest) * _DIGITS) / _DIGITS
    for tried in (limit, max(limit - 1 / _DIGITS, least), max(limit - 2 / _DIGITS, least)):
        if limit >= least and Table.build(problem.at(tried)).is_feasible(most):
            return tried
    return None
