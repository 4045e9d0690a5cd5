"""Solves a problem for a range of budgets (``snip solve --sweep``)."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.precision.budget import MAX_SPEEDUP
from snip_megatron.solver.api import solve
from snip_megatron.solver.infeasible import infeasibility
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.solution import Solution
from snip_megatron.solver.table import Table

SWEEP_SCHEMA = "snip.sweep/1"
DEFAULT_POINTS = 41


def sweep(problem: Problem, points: int = DEFAULT_POINTS, **options: Any) -> list[Solution]:
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


def sweep_json(problem: Problem, solutions: Sequence[Solution]) -> str:
    """Return the text of a ``snip.sweep/1`` file: the figures of every point, and the share of the cost by format."""
    cost = {item.id: item.cost for item in problem.items}
    points = [
        {
            "budget": s.budget.value,
            **{name: getattr(s, name) for name in ("status", "objective", "bound", "loss", "achieved")},
            "speedup": s.finite_speedup,
            "cost_share": cost_shares(s, cost),
            "solve_seconds": s.solve_seconds,
        }
        for s in solutions
    ]
    kind = "target" if problem.budget.kind == "fp4" else problem.budget.kind
    body = {"schema": SWEEP_SCHEMA, "kind": kind, "stage_tolerance": problem.stage_tolerance, "points": points}
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def cost_shares(solution: Solution, cost: dict[str, float]) -> dict[str, float]:
    """Return format → its share of the cost, which is given by the options' ids."""
    total: dict[Format, float] = defaultdict(float)
    for name, fmt in solution.choices.items():
        total[fmt] += cost[name]
    everything = sum(cost.values()) or 1.0
    return {fmt.value: total[fmt] / everything for fmt in Format if fmt in total}
