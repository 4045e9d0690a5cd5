"""Solves a problem for a range of budgets, as a report shows them."""

from collections import defaultdict
from typing import Any

import numpy as np

from snip_megatron.precision import Format
from snip_megatron.precision.budget import MAX_SPEEDUP
from snip_megatron.precision.errors import SnipError
from snip_megatron.solver.api import solve
from snip_megatron.solver.infeasible import infeasibility
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.solution import Solution
from snip_megatron.solver.table import Table


def sweep(problem: Problem, points: int, **options: Any) -> list[Solution]:
    """Solve a problem at evenly spaced budgets of its kind, from the lowest useful to the highest reachable one.

    ``options`` are arguments of :func:`solve`. Raises SnipError if ``points`` is below 2, or nothing can be reached.
    """
    if points < 2:
        raise SnipError(f"a sweep needs 2 points or more, got {points}")
    low, high = _reachable(problem)
    return [solve(problem.at(wanted), **options) for wanted in np.linspace(low, high, points).tolist()]


def _reachable(problem: Problem) -> tuple[float, float]:
    """Return the lowest and the highest useful budget. Beyond the latter nothing is feasible, or nothing is gained."""
    if problem.budget.kind == "loss":
        table = Table.build(problem)
        return float(np.nextafter(table.least, np.inf)), max(table.least, table.total_loss(table.most_saving()))
    lowest, most = (0.0, 1.0) if problem.budget.kind == "fp4" else (1.0, MAX_SPEEDUP)
    fault = infeasibility(problem.at(most))
    if fault is None:
        return lowest, most
    if fault.reachable is None:
        raise SnipError(f"nothing to sweep: {fault.why}", exit_code=3)
    return lowest, fault.reachable


def cost_shares(solution: Solution, cost: dict[str, float]) -> dict[str, float]:
    """Return format → its share of the cost, which is given by the options' ids."""
    total: dict[Format, float] = defaultdict(float)
    for name, fmt in solution.choices.items():
        total[fmt] += cost[name]
    everything = sum(cost.values()) or 1.0
    return {fmt.value: total[fmt] / everything for fmt in Format if fmt in total}
