"""Explains why a budget cannot be met: which stage limits it, and what can be reached."""

from __future__ import annotations

import math
from dataclasses import replace

from snip_megatron.solver.items import Budget
from snip_megatron.solver.solution import Infeasibility
from snip_megatron.solver.table import ChoiceTable

_DIGITS = 1e9  # reachable values are rounded so that a budget of the printed value can be met


def why_infeasible(table: ChoiceTable, budget: Budget) -> Infeasibility:
    """Return the explanation for an infeasible budget.

    The limit follows from the choices that save most on every item, or for a budget of kind ``loss`` from those with
    the least loss.
    """
    return {"target": _target, "speedup": _speedup, "loss": _loss}[budget.kind](table, budget)


def _target(table: ChoiceTable, budget: Budget) -> Infeasibility:
    total, per_stage = table.savings(table.most_saving())
    reach = {
        stage: saved / cost if cost > 0 else -math.inf
        for stage, saved, cost in zip(table.stages, per_stage.tolist(), table.stage_cost.tolist(), strict=True)
        if cost > 0 or saved < 0
    }
    lowest = min(reach, key=lambda stage: (reach[stage], stage))
    limit = total / table.cost if table.cost > 0 else -math.inf
    tolerance = budget.stage_tolerance
    by_stage = tolerance is not None and reach[lowest] + tolerance < limit
    if by_stage and tolerance is not None:
        limit = reach[lowest] + tolerance
    why = f"stage {lowest} saves at most {reach[lowest]:.6g} of its cost"
    if not by_stage:
        why = f"all stages together save too little (lowest: {why})"
    if limit < 0:
        return Infeasibility(f"{why}; no target is reachable", lowest, None)
    limit = math.floor(limit * _DIGITS) / _DIGITS
    if not table.asking(replace(budget, target=limit)).feasible(table.most_saving()):
        limit = max(0.0, limit - 1 / _DIGITS)
    return Infeasibility(f"{why}; the highest reachable target is {limit:.9g}", lowest, limit)


def _speedup(table: ChoiceTable, budget: Budget) -> Infeasibility:
    fastest = table.most_saving()
    costs = table.costs(budget) - table.savings(fastest)[1]
    times = dict(budget.fixed_cost) | dict(zip(table.stages, costs.tolist(), strict=True))
    slowest = max(times, key=lambda stage: (times[stage], -stage))
    limit = math.floor(table.reference(budget) / times[slowest] * _DIGITS) / _DIGITS
    why = f"stage {slowest} costs at least {times[slowest]:.6g}"
    if limit < 1:
        return Infeasibility(f"{why}, more than the reference; no speedup is reachable", slowest, None)
    if not table.asking(replace(budget, speedup=limit)).feasible(fastest):
        limit = max(1.0, limit - 1 / _DIGITS)
    # With only nine significant digits, a number above 1 could be rounded up to a speedup that is not reachable.
    return Infeasibility(f"{why}; the highest reachable speedup is {limit:.12g}", slowest, limit)


def _loss(table: ChoiceTable, budget: Budget) -> Infeasibility:
    least = math.fsum(table.true_loss.min(axis=1))
    return Infeasibility(f"the smallest reachable loss is {least:.17g}", None, least)
