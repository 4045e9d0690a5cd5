"""The Pareto front of a run's latest Problem: the least predicted loss at other budgets.

The front is solved when the report is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.precision.budget import Budget
from snip_megatron.records.readers import step_files
from snip_megatron.records.run_data import Update
from snip_megatron.solver import Problem, sweep
from snip_megatron.solver.pareto import cost_shares

POINTS = 17
SECONDS = 10.0
"""Approximate limit of the solving time. Points that are not proven optimal by then are marked or left out."""
MAX_BYTES = 32 << 20
"""Size limit of a Problem file. ``snip solve --sweep`` draws the front of a larger one."""


@dataclass(frozen=True)
class Point:
    """The solution for one budget: the fp4 share of FLOPs or predicted speedup ``x`` that it reaches, the sum of its
    predicted losses, whether it is proven optimal, and the share of the cost by format.
    """

    x: float
    loss: float
    proven: bool
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Front:
    """Loss against budget for one update.

    Attributes:
        step: the step of the Problem.
        kind: ``target`` (x is the fp4 share of FLOPs) or ``speedup`` (x is a predicted speedup).
        points: the points, ascending by x.
        asked: the run's budget as (kind, value).
        chosen: the run's own map as (x, sum of losses); None if the run adopted no map from this Problem.
        seconds: the solving time.
    """

    step: int
    kind: str
    points: Sequence[Point]
    asked: tuple[str, float]
    chosen: tuple[float, float] | None
    seconds: float


def latest_front(
    run: Path, updates: Sequence[Update], unreadable: list[str], *, points: int = POINTS, seconds: float = SECONDS
) -> Front | None:
    """Solve the front of the latest stored Problem.

    Args:
        run: the run directory.
        updates: the updates of the run.
        unreadable: receives a message if the Problem cannot be read or solved.
        points: the number of budgets.
        seconds: approximate limit of the solving time.

    Returns:
        The front, or None if there is no Problem, if it is one over phases, or if it cannot be read or solved.
    """
    try:
        files = step_files(run, "problems")
        if not files:
            return None
        step = max(files)
        if files[step].stat().st_size > MAX_BYTES:
            raise SnipError(f"{files[step]}: larger than {MAX_BYTES >> 20} MiB; draw it with snip solve --sweep")
        problem = Problem.from_json(files[step].read_bytes(), where=str(files[step]))
        if problem.phases:  # one over the phases of a run has no such front
            return None
        return _front(step, problem, _chosen(problem, step, updates), points, seconds)
    except OSError as error:
        unreadable.append(f"{files[step]}: cannot be read ({error})")
    except SnipError as error:
        unreadable.append(str(error))
    return None


def _front(step: int, problem: Problem, chosen: tuple[float, float] | None, points: int, seconds: float) -> Front:
    started = time.perf_counter()
    share = problem.budget.kind == "fp4"
    asked = ("target" if share else problem.budget.kind, problem.budget.value)
    if problem.budget.kind == "loss":  # the same trade-off, drawn over the predicted speedup
        problem = replace(problem, budget=Budget("speedup", 1.0))
    cost = {item.id: item.cost for item in problem.items}
    found = []
    for solution in sweep(problem, points, time_limit_s=seconds / points):
        x = solution.achieved if share else solution.finite_speedup
        if x is not None and solution.loss is not None and solution.choices:
            found.append(Point(x, solution.loss, solution.status == "optimal", cost_shares(solution, cost)))
    return Front(step, "target" if share else "speedup", found, asked, chosen, time.perf_counter() - started)


def _chosen(problem: Problem, step: int, updates: Sequence[Update]) -> tuple[float, float] | None:
    """Return (x, sum of losses) of the map that the run solved from this Problem, or None."""
    for update in updates:
        if update.step == step:
            share = problem.budget.kind == "fp4"
            x, loss = (update.achieved, update.objective) if share else (update.speedup, update.loss)
            if x is not None and loss is not None:
                return x, loss
    return None
