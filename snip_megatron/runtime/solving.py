"""The solver process of an update: what it runs, and rank 0's end of it.

It builds the problem of an update, solves it, and answers with a map or a plan. :class:`SidecarClient` starts ``main``
in a process without CUDA devices, from a thread for which the training thread does not wait, and exchanges pickles with
it. This module and what it imports there need neither torch nor Megatron. The process pools of the standard library are
no alternative, because they import the main module of the training a second time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.precision.strict_json import JsonFields

if TYPE_CHECKING:
    from snip_megatron.sensitivity.request import SolveRequest
    from snip_megatron.sensitivity.table import StatisticsTable
    from snip_megatron.solver.solution import Solution

_PR_SET_PDEATHSIG = 1
_NICENESS = 5
SOLVE = "snip_megatron.runtime.solving:solve_job"
_WORKER = "import sys; from snip_megatron.runtime.solving import main; sys.exit(main(*sys.argv[1:]))"
_CLOSE_S = 2.0  # a process that is killed ends in milliseconds, unless it hangs in the kernel
# Variables of torchrun, SLURM and NCCL, from which libraries would conclude that the process is a rank.
_RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "GROUP_", "ROLE_", "PMI_", "PMIX_", "OMPI_")
_RANK_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "SLURM_PROCID")
)


@dataclass(frozen=True)
class SolveJob:
    """The statistics of one update, and the request that is solved over them."""

    table: StatisticsTable
    request: SolveRequest


@dataclass(frozen=True)
class Candidate(JsonFields):
    """A map of an update, of which one is adopted."""

    # the map, which is the first of ``plan`` if there is one. Its target and predicted loss are those of the update,
    # also if the solver minimised scores of another policy
    precision_map: PrecisionMap
    policy: str  # the policy whose scores the solver minimised
    predicted: float | None  # the predicted rise of the loss by the map's fprops, ΣΔL in nats. None if it is not known
    # the predicted rise by its dgrads and wgrads in nats. 0 if the policy does not score them in nats
    backward: float = 0.0
    plan: PrecisionPlan | None = None  # the plan of the remaining phases. None in a run without phases
    weight: float = 1.0  # what the budget bounds, relative to the predicted rise by the map. It is 1 without phases


@dataclass(frozen=True)
class SidecarResult:
    """The outcome of one job. Either ``candidates`` or ``failure`` is set."""

    version: int = 0  # version of the request. The client sets it
    # why there is no map: ``died`` (the process ended), ``exception``, ``infeasible``, ``deadline`` (no answer in time)
    # or ``oom``. None if there is one
    failure: str | None = None
    message: str = ""  # the failure in one line
    # the map or plan of the request, and that of the rule ``backward-first`` if it costs the same and is another map
    candidates: tuple[Candidate, ...] = ()
    # why past steps have made the request's budget over the run impossible. ``plan`` then has the highest reachable
    # budget. None if it has the request's
    out_of_reach: str | None = None
    problem_json: str | None = None  # the Problem. None if the job failed before it was built
    scores: Mapping[str, Any] = field(default_factory=dict)  # the scores from which the Problem was built
    latency_s: float = 0.0  # seconds from the submission to the answer or the failure. The client sets it


class SolverInProcess:
    """Solves each job in this process when it is submitted, with the methods of :class:`SidecarClient`."""

    restarts = 0
    last_error: str | None = None

    def __init__(self) -> None:
        self._results: list[SidecarResult] = []

    def submit(self, job: SolveJob) -> None:
        started = time.perf_counter()
        result = _answer(job, solve_job)
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
    plan = None if request.phases is None else _plan(job, solution, scores)
    solved = _candidate(request, solution.to_precision_map(request.version) if plan is None else plan.at(0), scores)
    if plan is not None:
        rise = _sum_of_scores(solved.precision_map, scores, "q")
        of_run = solution.loss if request.budget.kind == "loss" else None
        solved = dataclasses.replace(solved, plan=plan, weight=1.0 if of_run is None or rise <= 0.0 else of_run / rise)
    rule = _rule(job, solved.precision_map, scores, limits)
    return dataclasses.replace(
        result, candidates=(solved,) if rule is None else (solved, rule), out_of_reach=out_of_reach
    )


def _candidate(
    request: SolveRequest, precision_map: PrecisionMap, scores: Mapping[str, Any], policy: str | None = None
) -> Candidate:
    """Return a map that was solved by ``policy``, by default the request's, with its figures by ``scores``."""
    from snip_megatron.sensitivity.policies import in_nats, needs_forward_noise

    predicted, backward = _sum_of_scores(precision_map, scores, "delta_loss"), 0.0
    if needs_forward_noise(request) and in_nats(request.policy, request.q):
        backward = max(0.0, _sum_of_scores(precision_map, scores, "q") - predicted)
    return Candidate(precision_map, policy or request.policy, predicted, backward)


def _rule(
    job: SolveJob, chosen: PrecisionMap, scores: Mapping[str, Any], limits: Mapping[str, Any]
) -> Candidate | None:
    """Return the map of ``backward-first`` at the cost of ``chosen``. None if it is the same map, or there is none.

    Its own scores are no losses. Under ``loss=`` it must therefore reach the speedup of ``chosen``. It is a candidate
    only where dgrads and wgrads are scored in nats, and not beside a plan. A measured rise does not include their cost,
    so that with scores in another unit the rule would always seem the better map. Under ``fisher`` they score 0, and
    both maps are the same but for ties.
    """
    from snip_megatron.sensitivity.policies import in_nats, needs_forward_noise
    from snip_megatron.sensitivity.problem import build_problem
    from snip_megatron.solver import solve

    request, budget = job.request, job.request.budget
    if request.phases is not None or not needs_forward_noise(request) or not in_nats(request.policy, request.q):
        return None
    if budget.kind == "loss":
        if chosen.speedup is None or chosen.speedup <= 1.0:
            return None
        budget = Budget("speedup", chosen.speedup * (1.0 - 1e-9))
    problem, _ = build_problem(job.table, dataclasses.replace(request, policy="backward-first", budget=budget))
    solution = solve(problem, **limits)
    if solution.status == "infeasible" or solution.choices == dict(chosen.choices):
        return None
    rule = solution.to_precision_map(request.version)
    q = _sum_of_scores(rule, scores, "q")
    rule = dataclasses.replace(
        rule, objective=q, bound=chosen.bound, target=chosen.target, budget=chosen.budget,
        loss=None if chosen.loss is None else q,
    )  # fmt: skip
    return _candidate(request, rule, scores, "backward-first")


def _sum_of_scores(precision_map: PrecisionMap, scores: Mapping[str, Any], column: str) -> float:
    """Return the sum of a column of ``scores`` over a map's choices. A format that only a pin allows has no score."""
    chosen = (scores[key].get(fmt.value) for key, fmt in precision_map.choices.items() if key in scores)
    return math.fsum(score[column] for score in chosen if score is not None)


def _plan(job: SolveJob, solution: Solution, scores: Mapping[str, Any]) -> PrecisionPlan:
    """Return the plan of a solution. Each map has its loss over a whole run, which the guard compares."""
    assert job.request.phases is not None
    plan = solution.to_plan(job.request.phases.begins, job.request.version)
    maps = [phase.precision_map for phase in plan.phases]
    with_loss = [dataclasses.replace(each, loss=_sum_of_scores(each, scores, "q")) for each in maps]
    phases = (PlanPhase(phase.begin, each) for phase, each in zip(plan.phases, with_loss, strict=True))
    return dataclasses.replace(plan, phases=tuple(phases))


# -- the process -----------------------------------------------------------------------------------------------------
def main(parent: str, path: str) -> int:
    """Read a job from standard input, solve it, and write the answer to standard output.

    ``parent`` is the parent's process id, and ``path`` the ``module:function`` that solves a job. Returns the exit
    code.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
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

    try:
        job = pickle.load(jobs)
    except EOFError:  # the run has ended
        return 0
    pickle.dump(_answer(job, solve), answers, protocol=5)
    answers.close()
    return 0


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


# -- rank 0 ----------------------------------------------------------------------------------------------------------
class SidecarClient:
    """Solves one job after the other, each in a solver process of its own.

    The process of the next job is started beforehand, so that its modules are loaded when the job comes. A job fails if
    its process ends without an answer, or does not answer within the deadline and is killed.

    Args:
        deadline_s: Seconds from the submission of a job to its deadline.
        solve: The function that the process calls, as ``module:function``.

    Attributes:
        restarts: Number of processes that ended without an answer and were replaced.
        last_error: Why the latest of them ended, in one line. None if none has.
    """

    def __init__(self, *, deadline_s: float = 600.0, solve: str = SOLVE) -> None:
        self._deadline, self._solve = deadline_s, solve
        self._jobs: queue.SimpleQueue[tuple[int, bytes, float] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[SidecarResult] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self.restarts = 0
        self.last_error: str | None = None
        self._thread = threading.Thread(target=self._serve, name="snip-sidecar", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process id. None while there is no process."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, job: SolveJob) -> None:
        """Queue a job. :meth:`poll` returns its outcome."""
        self._jobs.put((job.request.version, pickle.dumps(job, protocol=5), time.monotonic()))

    def poll(self) -> SidecarResult | None:
        """Return the oldest outcome that has not been returned. None if there is none."""
        return None if self._results.empty() else self._results.get()

    def close(self) -> None:
        """End the process. Jobs without an answer are dropped."""
        self._closed.set()
        self._jobs.put(None)
        if (process := self._process) is not None:
            process.kill()
        self._thread.join(_CLOSE_S)

    # -- the thread ------------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        self._start_process()
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            version, payload, submitted = job
            process = self._process
            if process is not None and process.poll() is not None:  # it has ended while it waited
                self._note_end(_reason(process.returncode))
                self._start_process()
            result = self._exchange(payload, submitted + self._deadline)
            self._results.put(dataclasses.replace(result, version=version, latency_s=time.monotonic() - submitted))
            self._start_process()
        if self._process is not None:
            with self._process as process:
                process.kill()

    def _start_process(self) -> None:
        if self._closed.is_set():
            return
        command = [sys.executable, "-c", _WORKER, str(os.getpid()), self._solve]
        # SLURM may send the SIGTERM of a preemption to every process of a step. A rank saves a checkpoint then, while
        # its solver process would die. The process inherits the mask of this thread, and keeps it after exec.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_worker_environment()
            )
        except OSError as error:  # the host is out of processes or memory
            self._process, self.last_error = None, str(error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _exchange(self, payload: bytes, deadline: float) -> SidecarResult:
        """Give a job to the process, and return its answer or why there is none. The process has ended then."""
        if self._process is None:
            self._start_process()
        if self._process is None:
            return SidecarResult(failure="died", message=self.last_error or "there is no solver process")
        failure, why = "died", "the solver process sent something that is no answer"
        with self._process as process:  # reaps it
            try:
                answer, _ = process.communicate(payload, timeout=max(0.0, deadline - time.monotonic()))
                if process.returncode:
                    why = _reason(process.returncode)
                elif isinstance(result := pickle.loads(answer), SidecarResult):
                    return result
            except subprocess.TimeoutExpired:
                failure, why = "deadline", f"no answer within {self._deadline:g} s; the solver process was killed"
            except Exception as error:  # unpickling may raise anything
                why += f" ({type(error).__name__})"
            finally:
                process.kill()  # SIGKILL also ends a stopped process
                self._process = None
        self._note_end(why)
        return SidecarResult(failure=failure, message=why)

    def _note_end(self, why: str) -> None:
        """Note why a process ended without an answer. Another one takes its place."""
        self.last_error = why
        self.restarts += 1


def _reason(code: int) -> str:
    """Return why a process ended, from its return code."""
    if code >= 0:
        return f"the solver process ended with exit code {code}"
    hint = " (the kernel does this when memory runs out)" if code == -signal.SIGKILL else ""
    return f"the solver process was killed by {signal.Signals(-code).name}{hint}"


def _worker_environment() -> dict[str, str]:
    """Return this process's environment without variables of a rank and without devices, with its module path."""
    shared = {k: v for k, v in os.environ.items() if k not in _RANK_NAMES and not k.startswith(_RANK_PREFIXES)}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return shared | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
