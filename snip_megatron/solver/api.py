"""The solver's entry point, :func:`solve`, which takes a problem and returns a solution."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from snip_megatron.errors import SnipError, quoted
from snip_megatron.precision import Format
from snip_megatron.solver.collector import collector_paused
from snip_megatron.solver.fastest import solve_fastest
from snip_megatron.solver.greedy import solve_greedy
from snip_megatron.solver.infeasible import why_infeasible
from snip_megatron.solver.limits import Limits, Outcome
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.solution import Solution, saved_share, speedup_of
from snip_megatron.solver.spanning import solve_spanning, spanning_groups
from snip_megatron.solver.table import ChoiceTable, Ints
from snip_megatron.solver.units import decision_units

SOLVERS = ("cpsat", "greedy")
DEFAULT_SECONDS = 60.0
_LEAST_SECONDS = 1e-3


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    deterministic_time: float | None = None,
    seed: int = 0,
    hint: Mapping[str, Format] | None = None,
    change_penalty: float = 0.0,
    solver: str = "cpsat",
) -> Solution:
    """Choose one format for every item of a problem, within its budget.

    Args:
        problem: the problem.
        time_limit_s: limit in wall-clock seconds. If neither limit is given, it is 60. A solve that reaches this limit
            may end differently on another machine.
        deterministic_time: limit of the whole solve in CP-SAT's deterministic seconds. Use it if results must be
            repeatable.
        seed: CP-SAT's seed. Equal seeds give equal results.
        hint: item id → format, for example the choices of the previous map. Unknown ids and formats are ignored.
        change_penalty: loss that is added for every item whose format differs from the hint.
        solver: ``cpsat``, which proves that its solution is optimal, or ``greedy``, which makes one pass and gives a
            bound.

    Returns:
        The solution. Its status is ``infeasible`` if no choice of formats meets the budget.

    Raises:
        SnipError: an argument is invalid.
    """
    started = time.perf_counter()
    limits = make_limits(time_limit_s, deterministic_time, seed)
    if solver not in SOLVERS:
        raise SnipError(f"solver {quoted(solver)} is not one of {', '.join(SOLVERS)}")
    if not (math.isfinite(change_penalty) and change_penalty >= 0):
        raise SnipError(f"change_penalty must be 0 or more, got {change_penalty}")
    if change_penalty and problem.budget.kind == "loss":
        raise SnipError("change_penalty has no meaning under a loss budget: time is what is minimised there")
    spanning = spanning_groups(problem)
    if spanning:

        def part(within: Problem, by: str) -> Solution:
            solution = solve(
                within,
                time_limit_s=max(limits.seconds, _LEAST_SECONDS),
                deterministic_time=max(limits.left, _LEAST_SECONDS),
                seed=seed,
                hint=hint,
                change_penalty=change_penalty,
                solver=by,
            )
            limits.spend(solution.deterministic_seconds)
            return solution

        best = solve_spanning(problem, spanning, solver, part)
        return replace(best, solve_seconds=time.perf_counter() - started)
    with collector_paused():
        table = ChoiceTable.build(problem, hint, change_penalty)
    start = _hinted(table, hint)
    if problem.budget.kind == "loss":
        outcome = solve_fastest(table, problem.budget, lambda t, pick: _run(t, _better(t, start, pick), solver, limits))
    elif table.feasible(table.most_saving()):
        outcome = _run(table, start, solver, limits)
    else:
        outcome = None
    if outcome is None:
        return Solution(
            choices={},
            status="infeasible",
            target=problem.budget.wanted,
            kind=problem.budget.kind,
            solve_seconds=time.perf_counter() - started,
            fault=why_infeasible(table, problem.budget),
        )
    solution = _solution(table, problem, outcome, penalised=change_penalty > 0)
    return replace(solution, solve_seconds=time.perf_counter() - started, deterministic_seconds=limits.spent)


def make_limits(time_limit_s: float | None, deterministic_time: float | None, seed: int) -> Limits:
    """Return the limits of one solve. Raises SnipError if a limit is not above 0."""
    for name, value in (("time_limit_s", time_limit_s), ("deterministic_time", deterministic_time)):
        if value is not None and not value > 0:
            raise SnipError(f"{name} must be above 0, got {value}")
    if time_limit_s is None:
        time_limit_s = DEFAULT_SECONDS if deterministic_time is None else math.inf
    return Limits(
        time.perf_counter() + time_limit_s, math.inf if deterministic_time is None else deterministic_time, seed
    )


def _run(table: ChoiceTable, start: Ints | None, solver: str, limits: Limits) -> Outcome:
    """Solve a feasible problem once."""
    if solver == "greedy":
        return solve_greedy(table, start)
    from snip_megatron.solver.exact import solve_exact  # imports OR-Tools, which training ranks do not need

    return solve_exact(table, start, limits)


def _better(table: ChoiceTable, start: Ints | None, pick: Ints) -> Ints:
    """Return the hint if it is feasible and better than ``pick``, otherwise ``pick``."""
    if start is None or not table.feasible(start):
        return pick
    return start if table.difference(start, pick) < 0 else pick


def _hinted(table: ChoiceTable, hint: Mapping[str, Format] | None) -> Ints | None:
    """Return the hint as picks. A row without a usable hint gets the format that saves most."""
    if not hint:
        return None
    pick = table.most_saving()
    column = {f: j for j, f in enumerate(table.formats)}
    for i, name in enumerate(table.ids):
        j = column.get(hint[name]) if name in hint else None
        if j is not None and np.isfinite(table.loss[i, j]):
            pick[i] = j
    return pick


def _solution(table: ChoiceTable, problem: Problem, outcome: Outcome, *, penalised: bool) -> Solution:
    """Return the outcome as a Solution. Every figure except the bound is computed from the choices."""
    budget, pick = problem.budget, outcome.pick
    formats = [table.formats[j] for j in pick.tolist()]
    if len(formats) == len(problem.items):
        chosen = dict(zip(table.ids, formats, strict=True))
    else:
        units = decision_units(problem.items)
        chosen = {name: fmt for unit, fmt in zip(units, formats, strict=True) for name in unit.ids}
    loss = math.fsum(next(c.loss for c in item.choices if c.format is chosen[item.id]) for item in problem.items)
    slowest = None if budget.kind == "target" else table.slowest(pick, budget)
    objective = table.objective(pick) if penalised else loss
    if budget.kind == "loss" and slowest is not None:
        objective = slowest
    total, per_stage = table.savings(pick)
    return Solution(
        choices={item.id: chosen[item.id] for item in problem.items},
        status="optimal" if outcome.optimal else "feasible",
        target=budget.wanted,
        kind=budget.kind,
        objective=objective,
        bound=min(objective, outcome.bound),
        achieved=saved_share(total, table.cost),
        achieved_per_stage={
            stage: saved_share(float(saved), float(cost))
            for stage, saved, cost in zip(table.stages, per_stage, table.stage_cost, strict=True)
        },
        loss=loss,
        speedup=None if slowest is None else speedup_of(table.reference(budget), slowest),
    )
