"""The Pareto front of a run's latest Problem, solved when the report is written."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.strict_json import read_file
from snip_megatron.runtime.records.readers import step_files
from snip_megatron.runtime.records.run_data import Update
from snip_megatron.runtime.records.stored import Stored, rebuild
from snip_megatron.solver import Problem, sweep
from snip_megatron.solver.pareto import cost_shares

POINTS = 17
SECONDS = 10.0
"""Approximate limit of the solving time. Points that are not proven optimal by then are marked or left out."""


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
    """Loss against budget for the update of ``step``: the ``points``, ascending by x, which is the fp4 share of FLOPs
    (``share``) or a predicted speedup; the budget that was ``asked``; the run's own map as (x, sum of losses), None if
    it adopted none from this Problem; and the solving time.
    """

    step: int
    share: bool
    points: Sequence[Point]
    asked: Budget
    chosen: tuple[float, float] | None
    seconds: float


def latest_front(run: Path, updates: Sequence[Update], unreadable: list[str], *, points: int = POINTS) -> Front | None:
    """Solve the front of the latest stored Problem at ``points`` budgets in about :data:`SECONDS`.

    Of an update that planned phases it is the front of one map, without the run's own. Returns None if there is no
    Problem, or if it cannot be read or solved, of which ``unreadable`` receives a message.
    """
    try:
        files = step_files(run, "problems")
        if not files:
            return None
        step = max(files)
        problem = Problem.from_json(read_file(files[step]), where=str(files[step]))
        if problem.phases:
            problem, updates = rebuild(Stored(run, step), {}, None), ()
        return _front(step, problem, updates, points)
    except SnipError as error:
        unreadable.append(str(error))
    return None


def _front(step: int, problem: Problem, updates: Sequence[Update], points: int) -> Front:
    started, asked = time.perf_counter(), problem.budget
    share = asked.kind == "fp4"
    if asked.kind == "loss":  # the same trade-off, drawn over the predicted speedup
        problem = replace(problem, budget=Budget("speedup", 1.0))
    cost = {item.id: item.cost for item in problem.items}
    found = []
    for solution in sweep(problem, points, time_limit_s=SECONDS / points):
        x = solution.achieved if share else solution.finite_speedup
        if x is not None and solution.loss is not None and solution.choices:
            found.append(Point(x, solution.loss, solution.status == "optimal", cost_shares(solution, cost)))
    own = [(u.achieved, u.objective) if share else (u.speedup, u.loss) for u in updates if u.step == step]
    chosen = next(((x, loss) for x, loss in own if x is not None and loss is not None), None)
    return Front(step, share, found, asked, chosen, time.perf_counter() - started)
