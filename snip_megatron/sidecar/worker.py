"""The sidecar's own process: ``python -m snip_megatron.sidecar.worker PARENT_PID BUILD``.

It reads jobs from standard input and writes answers to what was its standard output. It imports neither torch nor
Megatron, sees no CUDA device and knows nothing of the ranks. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

from snip_megatron.errors import SnipError
from snip_megatron.sidecar.messages import Answer, SidecarFailure, SolveJob, read_frame, write_frame

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 1.0
_NICENESS = 5


def main(arguments: list[str]) -> int:
    """Serve jobs until the parent closes the pipe. ``arguments``: parent's pid, ``module:function`` of the builder,
    and ``bound`` where the kernel may be asked to kill this process with the thread that started it."""
    parent, build_path, binding = int(arguments[0]), arguments[1], arguments[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer; the pipe's end is for us
    _end_with(parent, bound=binding == "bound")
    os.nice(_NICENESS)
    jobs, answers = _private_pipes()
    import snip_megatron.solver.exact  # noqa: F401  OR-Tools loads here, not in the first job

    while (frame := read_frame(jobs)) is not None:
        number, payload = frame
        try:
            write_frame(answers, number, pickle.dumps(_answer(payload, build_path), protocol=5))
        except BrokenPipeError:  # the trainer wants no more of us
            os._exit(1)
    return 0


def _answer(payload: bytes, build_path: str) -> Answer:
    """Build and solve; whatever goes wrong becomes a failure."""
    try:
        return _solve(pickle.loads(payload), build_path)
    except MemoryError:
        return Answer(SidecarFailure("oom", "the solver process ran out of memory"))
    except SnipError as error:
        return Answer(SidecarFailure("exception", str(error)))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        return Answer(SidecarFailure("exception", f"{text} ({place})", traceback.format_exc()))


def _solve(job: SolveJob, build_path: str) -> Answer:
    from snip_megatron.sensitivity.problem import change_penalty
    from snip_megatron.solver import solve

    started = time.perf_counter()
    module, _, function = build_path.partition(":")
    built: Any = getattr(importlib.import_module(module), function)(job.table, job.request)
    problem, scores = built if isinstance(built, tuple) else (built, {})
    between = time.perf_counter()
    solution = solve(
        problem,
        deterministic_time=job.request.deterministic_time,
        seed=job.request.seed % 2**31,
        hint=job.hint,
        change_penalty=change_penalty(problem, job.request),
    )
    timings = {"build": between - started, "solve": time.perf_counter() - between}
    text = problem.to_json()
    if solution.status == "infeasible":
        failure = SidecarFailure("infeasible", str(solution.fault))
        return Answer(failure, problem_json=text, scores=scores, timings=timings)
    return Answer(solution=solution, problem_json=text, scores=scores, timings=timings)


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Jobs and answers on descriptors of their own: whatever prints to standard output goes to standard error."""
    jobs = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return jobs, answers


def _end_with(parent: int, *, bound: bool) -> None:
    """Die with the parent, however it dies and whatever this process is doing.

    The kernel's signal also reaches a stopped process, but it follows the *thread* that started us: it is asked for
    only where that is the parent's main thread. The watching thread works everywhere.
    """
    if bound and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
