"""``solve``: a problem in, a solution out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.solver.greedy import solve_greedy
from snip_megatron.solver.limits import Limits, Outcome
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.solution import Infeasibility, Solution
from snip_megatron.solver.table import ChoiceTable, Ints

SOLVERS = ("cpsat", "greedy")
DEFAULT_SECONDS = 60.0


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    deterministic_time: float | None = None,
    seed: int = 0,
    workers: int = 8,
    hint: Mapping[str, Format] | None = None,
    solver: str = "cpsat",
) -> Solution:
    """Choose one format an item: smallest Σ loss within the budget.

    Args:
        time_limit_s: wall seconds; 60 when neither limit is given. A solve that reaches it may end differently on
            another machine.
        deterministic_time: CP-SAT's deterministic seconds, the limit to use where results must repeat.
        seed, workers: of CP-SAT; equal values give equal results.
        hint: formats by item id, such as the previous map's choices; unknown ids and formats are ignored.
        solver: ``cpsat`` (proves its optimum) or ``greedy`` (one pass, with a bound).

    Returns a Solution, of status ``infeasible`` where nothing meets the budget. Raises SnipError on a bad argument.
    """
    if solver not in SOLVERS:
        raise SnipError(f"solver {solver!r} is not one of {', '.join(SOLVERS)}")
    for name, value in (("time_limit_s", time_limit_s), ("deterministic_time", deterministic_time)):
        if value is not None and not value > 0:
            raise SnipError(f"{name} must be above 0, got {value}")
    started = time.perf_counter()
    if time_limit_s is None:
        time_limit_s = DEFAULT_SECONDS if deterministic_time is None else math.inf
    table = ChoiceTable.build(problem)
    if not table.feasible(table.most_saving()):
        return _infeasible(table, problem, time.perf_counter() - started)
    start = _hinted(table, hint)
    if solver == "greedy":
        outcome = solve_greedy(table, start)
    else:
        from snip_megatron.solver.exact import solve_exact  # OR-Tools: loaded where it is used, not in training ranks

        limits = Limits(time_limit_s, math.inf if deterministic_time is None else deterministic_time, seed, workers)
        outcome = solve_exact(table, start, limits)
    return _solution(table, problem, outcome, started)


def _hinted(table: ChoiceTable, hint: Mapping[str, Format] | None) -> Ints | None:
    """The hint as picks; an item without a usable hint takes what saves most."""
    if not hint:
        return None
    pick = table.most_saving()
    column = {f: j for j, f in enumerate(table.formats)}
    for i, name in enumerate(table.ids):
        j = column.get(hint[name]) if name in hint else None
        if j is not None and np.isfinite(table.loss[i, j]):
            pick[i] = j
    return pick


def _solution(table: ChoiceTable, problem: Problem, outcome: Outcome, started: float) -> Solution:
    total, per_stage = table.savings(outcome.pick)
    chosen = dict(zip(table.ids, (table.formats[j] for j in outcome.pick.tolist()), strict=True))
    return Solution(
        choices={item.id: chosen[item.id] for item in problem.items},
        status="optimal" if outcome.optimal else "feasible",
        objective=table.objective(outcome.pick),
        bound=outcome.bound,
        target=problem.budget.target,
        achieved=_share(total, table.cost),
        achieved_per_stage={
            stage: _share(float(saved), float(cost))
            for stage, saved, cost in zip(table.stages, per_stage, table.stage_cost, strict=True)
        },
        solve_seconds=time.perf_counter() - started,
        deterministic_seconds=outcome.deterministic,
    )


def _infeasible(table: ChoiceTable, problem: Problem, seconds: float) -> Solution:
    """Every item saving its most still misses a need: the highest target is what that reaches."""
    total, per_stage = table.savings(table.most_saving())
    reach = {
        stage: saved / cost
        for stage, saved, cost in zip(table.stages, per_stage.tolist(), table.stage_cost.tolist(), strict=True)
        if cost > 0
    }
    limit = _share(total, table.cost)
    tolerance = problem.budget.stage_tolerance
    lowest = min(reach, key=lambda stage: (reach[stage], stage))
    by_stage = tolerance is not None and reach[lowest] + tolerance < limit
    if by_stage and tolerance is not None:
        limit = reach[lowest] + tolerance
    limit = math.floor(limit * 1e9) / 1e9
    if not table.meets(limit, tolerance, total, per_stage):  # asking for the printed target must succeed
        limit -= 1e-9
    return Solution(
        choices={},
        status="infeasible",
        target=problem.budget.target,
        solve_seconds=seconds,
        fault=Infeasibility(lowest, reach[lowest], by_stage, limit if limit >= 0 else None),
    )


def _share(saved: float, cost: float) -> float:
    return saved / cost if cost > 0 else 0.0
