"""What the solver process runs: it builds the problem of an update, solves it, and answers with a map or a plan.

:class:`SidecarClient` starts ``main`` in a process without CUDA devices. This module and what it imports there need
neither torch nor Megatron.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import math
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan

if TYPE_CHECKING:
    from snip_megatron.sensitivity.request import SolveRequest
    from snip_megatron.sensitivity.table import StatisticsTable
    from snip_megatron.solver.solution import Solution

_PR_SET_PDEATHSIG = 1
_NICENESS = 5


@dataclass(frozen=True)
class SolveJob:
    """The statistics of one update, and the request that is solved over them."""

    table: StatisticsTable
    request: SolveRequest


@dataclass(frozen=True)
class SidecarResult:
    """The outcome of one job. Either ``precision_map`` or ``failure`` is set.

    Attributes:
        version: Version of the request. The client sets it.
        failure: Why there is no map: ``died`` (the process ended), ``exception``, ``infeasible``, ``deadline`` (no
            answer in time) or ``oom``. None if there is one.
        message: The failure in one line.
        precision_map: The map. For a request with phases it is the first map of ``plan``.
        plan: The plan of a request with phases. None for another request.
        out_of_reach: Why past steps have made the request's budget over the run impossible. ``plan`` then has the
            highest reachable budget. None if it has the request's.
        problem_json: The Problem. None if the job failed before it was built.
        scores: The scores from which the Problem was built.
        latency_s: Seconds from the submission to the answer or the failure. The client sets it.
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
    """Solves each job in this process when it is submitted, with the methods of :class:`SidecarClient`."""

    restarts = 0
    last_error: str | None = None

    def __init__(self) -> None:
        self._results: list[SidecarResult] = []

    def start(self) -> None:
        """Do nothing."""

    def submit(self, job: SolveJob) -> None:
        started = time.perf_counter()
        result = solve_job(job)
        latency = time.perf_counter() - started
        self._results.append(dataclasses.replace(result, version=job.request.version, latency_s=latency))

    def poll(self) -> SidecarResult | None:
        return self._results.pop(0) if self._results else None

    def close(self) -> None:
        """Do nothing."""


def solve_job(job: SolveJob) -> SidecarResult:
    """Solve an update for a map, or for the plan of the remaining phases.

    If past steps have made a plan's budget impossible, the reachable value replaces it once. If the solver finds that
    value infeasible as well, the job fails.
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
    """Return the plan of a solution. Each map has its loss over a whole run, which the guard compares."""
    assert job.request.phases is not None
    plan = solution.to_plan(job.request.phases.begins, job.request.version)

    def with_loss(phase: PlanPhase) -> PlanPhase:
        chosen = (scores[key].get(fmt.value) for key, fmt in phase.precision_map.choices.items())
        loss = math.fsum(score["q"] for score in chosen if score is not None)  # a pinned format has no score
        return PlanPhase(phase.begin, dataclasses.replace(phase.precision_map, loss=loss))

    return dataclasses.replace(plan, phases=tuple(map(with_loss, plan.phases)))


# -- the process -----------------------------------------------------------------------------------------------------
def main(parent: str, path: str) -> int:
    """Read jobs from standard input and write answers to standard output until the parent closes the pipe.

    ``parent`` is the parent's process id, and ``path`` the ``module:function`` that solves a job. Returns the exit
    code.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer; this process ends with the pipe
    if sys.platform == "linux":  # when the parent's thread ends, this process ends too, even if it is busy or stopped
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent ended before prctl
        return 1
    os.nice(_NICENESS)
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a library prints must not reach the answers
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
    """Solve a job. Return any error as a failure."""
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
