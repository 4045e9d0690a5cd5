"""The solver's entry point, :func:`solve`, which takes a problem and returns a solution."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, quoted
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.solution import Solution, infeasibility
from snip_megatron.solver.table import GAP, Floats, Ints, Table

if TYPE_CHECKING:
    from snip_megatron.solver.search import Outcome

SOLVERS = ("cpsat", "greedy")
DEFAULT_SECONDS = 60.0


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    deterministic_time: float | None = None,
    seed: int = 0,
    solver: str = "cpsat",
) -> Solution:
    """Choose one format for every item of a problem, or for every item and phase, within its budget.

    Args:
        time_limit_s: limit in wall-clock seconds, 60 if neither limit is given. A solve that reaches it may end
            differently on another machine.
        deterministic_time: limit of the whole solve in CP-SAT's deterministic seconds, for results that must be
            repeatable.
        seed: CP-SAT's seed. Equal seeds give equal results.
        solver: ``cpsat``, which proves how good its solution is, or ``greedy``, which rounds and gives a bound.

    The status of the solution is ``infeasible`` if nothing meets the budget. Raises SnipError for an invalid argument.
    """
    started = time.perf_counter()
    for name, value in (("time_limit_s", time_limit_s), ("deterministic_time", deterministic_time)):
        if value is not None and not value > 0:
            raise SnipError(f"{name} must be above 0, got {value}")
    if solver not in SOLVERS:
        raise SnipError(f"solver {quoted(solver)} is not one of {', '.join(SOLVERS)}")
    from snip_megatron.solver.search import Limits, search  # imports OR-Tools, which training ranks do not need

    if time_limit_s is None:
        time_limit_s = DEFAULT_SECONDS if deterministic_time is None else math.inf
    limits = Limits(started + time_limit_s, math.inf if deterministic_time is None else deterministic_time, seed)
    table = Table.build(problem)
    outcome = search(table, limits, exact=solver == "cpsat")
    if outcome is None:
        solution = Solution({}, "infeasible", problem.budget, fault=infeasibility(problem))
    else:
        solution = _solution(problem, table, outcome)
    return replace(solution, solve_seconds=time.perf_counter() - started, deterministic_seconds=limits.used)


def _solution(problem: Problem, table: Table, outcome: Outcome) -> Solution:
    """Return the solution of an outcome. Every figure except the bound is computed from the choices."""
    budget, rows = problem.budget, table.rows
    savings = table.savings(outcome.assignment)
    unit = rows.reference or 1.0
    times = rows.reference - unit * table.phase_saving(savings)
    chosen = _formats(table, outcome.assignment)
    losses = [_loss(problem, p, formats) for p, formats in enumerate(chosen)]
    if budget.kind == "loss":
        total = float(table.steps.sum())
        objective = math.fsum((table.steps * times).tolist())
        bound = rows.reference * total + unit * outcome.bound
    else:
        objective, bound = table.total_loss(outcome.assignment), table.least + outcome.bound
    status = "optimal" if outcome.gap <= GAP else "feasible"
    phases = tuple(
        Solution(
            choices={item.id: formats[item.id] for item in problem.items},
            status=status,
            budget=budget,
            objective=losses[p],
            loss=losses[p],
            achieved=_share(float(savings[p, 0]), float(table.cost[0])),
            achieved_per_stage={
                stage: _share(float(saved), float(cost))
                for stage, saved, cost in zip(table.stages, savings[p, 1:], table.cost[1:], strict=True)
            },
            speedup=None if budget.kind == "fp4" else _speedup(rows.reference, float(times[p])),
        )
        for p, formats in enumerate(chosen)
    )
    bound = min(objective, bound)
    if not problem.phases:
        return replace(phases[0], objective=objective, bound=bound, gap=outcome.gap)
    return Solution(
        choices={},
        status=status,
        budget=budget,
        achieved=_average(problem, table, savings, times),
        loss=math.fsum(losses),
        phases=phases,
        steps=tuple(phase.steps for phase in problem.phases),
        objective=objective,
        bound=bound,
        gap=outcome.gap,
    )


def _formats(table: Table, assignment: Ints) -> list[dict[str, Format]]:
    """Return item id → format of every phase."""
    chosen: list[dict[str, Format]] = [{} for _ in table.steps]
    for columns, (first, last), j in zip(table.columns, table.span.tolist(), assignment.tolist(), strict=True):
        for p in range(first, last):
            chosen[p].update(columns[j])
    return chosen


def _loss(problem: Problem, phase: int, formats: Mapping[str, Format]) -> float:
    """Return Σ loss of a phase, correctly rounded."""
    return math.fsum(
        next(c.losses[phase] for c in item.choices if c.format is formats[item.id]) for item in problem.items
    )


def _average(problem: Problem, table: Table, savings: Floats, times: Floats) -> float:
    """Return the mean share of the run, or its reference time / time, including what is spent."""
    past_steps, achieved = problem.past
    if problem.budget.kind == "fp4":
        shares = [_share(float(saved), float(table.cost[0])) for saved in savings[:, 0]]
        return math.fsum([*(table.steps * shares).tolist(), past_steps * achieved]) / problem.steps
    reference = table.rows.reference
    taken = math.fsum([*(table.steps * times).tolist(), past_steps * reference / achieved])
    return _speedup(reference * problem.steps, taken)


def _share(saved: float, cost: float) -> float:
    return saved / cost if cost > 0 else 0.0


def _speedup(reference: float, time: float) -> float:
    if time > 0:
        return reference / time
    return 1.0 if reference == 0 else math.inf
