"""The worker process: ``python -m snip_megatron.runtime.sidecar.worker PARENT_PID MODULE:FUNCTION``.

It reads jobs from standard input and writes answers to its original standard output. It imports neither torch nor
Megatron, has no CUDA device and no variables of a rank, and ends with its parent.
"""

import ctypes
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable

from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.sidecar.solving import SidecarResult, SolveJob

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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
