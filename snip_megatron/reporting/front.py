"""What other budgets would have cost: the Pareto front of a run's latest Problem, solved when the report is written."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.reporting.readers import STEP_FILES, step_of
from snip_megatron.reporting.run_data import Update
from snip_megatron.solver import Budget, Problem, Solution, solve
from snip_megatron.solver.pareto import asking, reachable

POINTS = 17
SECONDS = 10.0
"""Solving ends after about this long; points that were not proven by then are left with their bound or out."""
MAX_BYTES = 32 << 20
"""A larger Problem is not one of a training run's: ``snip solve --sweep`` draws it."""


@dataclass(frozen=True)
class Point:
    """One budget: ``x`` reached (share of FLOPs in fp4, or predicted speedup), Σ loss, proven or not.

    ``shares``: format → its share of the cost.
    """

    x: float
    loss: float
    proven: bool
    shares: Mapping[Format, float]


@dataclass(frozen=True)
class Front:
    """Loss against budget for one update.

    Attributes:
        step: of the Problem. kind: ``target`` (x is a share of FLOPs in fp4) or ``speedup`` (x is a predicted speedup).
        points: by x. asked: the budget, as (kind, figure). chosen: the run's own map as (x, Σ loss); None: no map.
        seconds: that solving took.
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
    """The front of the latest stored Problem; None without one. What cannot be read or solved joins ``unreadable``."""
    files = {
        step: f for f in (run / "problems").glob("step_*") if (step := step_of(f, STEP_FILES["problems"])) is not None
    }
    if not files:
        return None
    step = max(files)
    try:
        if files[step].stat().st_size > MAX_BYTES:
            raise SnipError(f"{files[step]}: larger than {MAX_BYTES >> 20} MiB; draw it with snip solve --sweep")
        problem = Problem.from_json(files[step].read_bytes(), where=str(files[step]))
        return _front(step, problem, _chosen(problem, step, updates), points, seconds)
    except OSError as error:
        unreadable.append(f"{files[step]}: cannot be read ({error})")
    except SnipError as error:
        unreadable.append(str(error))
    return None


def _front(step: int, problem: Problem, chosen: tuple[float, float] | None, points: int, seconds: float) -> Front:
    started = time.perf_counter()
    budget = problem.budget
    kind = "target" if budget.kind == "target" else "speedup"
    if budget.kind == "loss":  # the same trade, by the axis that it shares with speedup
        problem = replace(problem, budget=Budget(speedup=1.0, fixed_cost=budget.fixed_cost))
    low, high = reachable(problem)
    found: list[Point] = []
    hint: Mapping[str, Format] | None = None
    for wanted in np.linspace(low, high, points)[::-1].tolist():
        left = seconds - (time.perf_counter() - started)
        if left <= 0:
            break
        solution = solve(asking(problem, wanted), time_limit_s=left, hint=hint)
        if solution.choices:
            hint = solution.choices
            found += _points(problem, solution)
    return Front(step, kind, found[::-1], (budget.kind, budget.wanted), chosen, time.perf_counter() - started)


def _points(problem: Problem, solution: Solution) -> list[Point]:
    """The solution as a point; none where no time is left at all."""
    x = solution.achieved if solution.kind == "target" else solution.finite_speedup
    if x is None or solution.loss is None:
        return []
    cost: dict[Format, float] = defaultdict(float)
    for item in problem.items:
        cost[solution.choices[item.id]] += item.cost
    total = sum(cost.values()) or 1.0
    shares = {fmt: cost[fmt] / total for fmt in Format if cost[fmt] > 0}
    return [Point(x, solution.loss, solution.status == "optimal", shares)]


def _chosen(problem: Problem, step: int, updates: Sequence[Update]) -> tuple[float, float] | None:
    """What the run's own solver reached with this Problem."""
    for update in updates:
        if update.step == step:
            share = problem.budget.kind == "target"
            x, loss = (update.achieved, update.objective) if share else (update.speedup, update.loss)
            loss = loss if update.loss is None else update.loss  # a penalty of changes is in the objective only
            if x is not None and loss is not None:
                return x, loss
    return None
