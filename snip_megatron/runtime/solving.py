"""A job of the sidecar and its solution: the problem is built and solved, its solution turned into maps and plans."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan

if TYPE_CHECKING:
    from snip_megatron.sensitivity.request import SolveRequest
    from snip_megatron.sensitivity.table import StatisticsTable
    from snip_megatron.solver.solution import Solution

import ctypes
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable

from snip_megatron.precision.errors import SnipError


@dataclass(frozen=True)
class SolveJob:
    """One update for the sidecar. The result has the ``version`` of the request."""

    table: StatisticsTable
    request: SolveRequest


@dataclass(frozen=True)
class SidecarResult:
    """The outcome of one job. ``precision_map`` or ``failure`` is set.

    Attributes:
        version, latency_s: the version of the request, and seconds from ``submit`` to the arrival of the answer, or to
            the detection of the failure. The client sets them.
        failure: why there is no map: ``died`` (the process ended), ``exception``, ``infeasible``, ``deadline`` (no
            answer in time) or ``oom``; None if there is one.
        precision_map, plan: the map, and the plan of a request with phases, whose first map it is.
        out_of_reach: why past steps have made the request's budget over the run impossible, so that ``plan`` has the
            highest reachable one; None if it has the request's.
        problem_json, scores: the Problem, and the scores from which it was built; None and none if the job failed
            before.
    """

    version: int = 0
    failure: str | None = None
    message: str = ""
    precision_map: PrecisionMap | None = None
    plan: PrecisionPlan | None = None
    out_of_reach: str | None = None
    problem_json: str | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    latency_s: float = 0.0


class SolverInProcess:
    """Takes the place of a :class:`SidecarClient`. A job is solved in this process, when it is submitted."""

    restarts = 0
    last_error: str | None = None

    def __init__(self) -> None:
        self._results: list[SidecarResult] = []

    def start(self) -> None:
        """Nothing is to be started."""

    def submit(self, job: SolveJob) -> None:
        started = time.perf_counter()
        result = solve_job(job)
        latency = time.perf_counter() - started
        self._results.append(dataclasses.replace(result, version=job.request.version, latency_s=latency))

    def poll(self) -> SidecarResult | None:
        return self._results.pop(0) if self._results else None

    def close(self) -> None:
        """Nothing is to be ended."""


def solve_job(job: SolveJob) -> SidecarResult:
    """Solve an update: for a map, or for the plan of the remaining phases.

    A plan's budget that past steps have made impossible is replaced by the reachable value. This happens once: if the
    solver finds that value infeasible as well, the job fails.
    """
    from snip_megatron.sensitivity.problem import build_problem
    from snip_megatron.solver import solve

    request = job.request
    limits: dict[str, Any] = {"deterministic_time": request.deterministic_time, "seed": request.seed % 2**31}
    problem, scores = build_problem(job.table, request)
    solution, out_of_reach = solve(problem, **limits), None
    if request.phases is not None and solution.fault is not None and solution.fault.reachable is not None:
        out_of_reach, reachable = solution.fault.why, Budget(problem.budget.kind, solution.fault.reachable)
        problem = dataclasses.replace(problem, budget=reachable)
        solution = solve(problem, **limits)
    result = SidecarResult(problem_json=problem.to_json(), scores=scores)
    if solution.status == "infeasible":
        why = str(solution.fault)
        if request.phases is not None:
            why += f" (phases 0, 1, … begin at steps {', '.join(map(str, request.phases.begins))})"
            why += "; lower its budget in --snip-schedule, or pin less"
        return dataclasses.replace(result, failure="infeasible", message=why)
    if request.phases is None:
        return dataclasses.replace(result, precision_map=solution.to_precision_map(request.version))
    plan = _plan(job, solution, scores)
    return dataclasses.replace(result, precision_map=plan.at(0), plan=plan, out_of_reach=out_of_reach)


def _plan(job: SolveJob, solution: Solution, scores: Mapping[str, Any]) -> PrecisionPlan:
    """Return the plan of a solution. Every map also holds its loss if it stayed, which the guard compares."""
    assert job.request.phases is not None
    plan = solution.to_plan(job.request.phases.begins, job.request.version)

    def with_loss(phase: PlanPhase) -> PlanPhase:
        chosen = (scores[key].get(fmt.value) for key, fmt in phase.precision_map.choices.items())
        loss = math.fsum(score["q"] for score in chosen if score is not None)  # a pinned format has no score
        return PlanPhase(phase.begin, dataclasses.replace(phase.precision_map, loss=loss))

    return dataclasses.replace(plan, phases=tuple(map(with_loss, plan.phases)))


_PR_SET_PDEATHSIG = 1
_NICENESS = 5


def main(parent: str, path: str) -> int:
    """Serve jobs by a ``module:function`` until the parent, given by its process id, closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer; this process ends with the pipe
    if sys.platform == "linux":  # a busy or stopped process ends as well, as soon as the parent's thread has ended
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before this
        return 1
    os.nice(_NICENESS)
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a library prints is no answer
    module, _, function = path.partition(":")
    solve: Callable[[SolveJob], SidecarResult] = getattr(importlib.import_module(module), function)
    import snip_megatron.solver.search  # noqa: F401  loads OR-Tools before the first job

    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return 0
        pickle.dump(_answer(job, solve), answers, protocol=5)
        answers.flush()


def _answer(job: SolveJob, solve: Callable[[SolveJob], SidecarResult]) -> SidecarResult:
    """Solve a job. Any error becomes a failure."""
    try:
        return solve(job)
    except MemoryError:
        return SidecarResult(failure="oom", message="the solver process ran out of memory")
    except SnipError as error:
        return SidecarResult(failure="exception", message=str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        return SidecarResult(failure="exception", message=f"{text} ({place})")
