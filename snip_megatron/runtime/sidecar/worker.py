"""The worker process: ``python -m snip_megatron.runtime.sidecar.worker PARENT_PID BUILD bound|free``.

It reads jobs from standard input and writes answers to its original standard output. It imports neither torch nor
Megatron, has no CUDA device and no variables of a rank, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import BinaryIO

from snip_megatron.errors import SnipError
from snip_megatron.runtime.sidecar.messages import SidecarFailure, SidecarResult, SolveJob, read_frame, write_frame
from snip_megatron.runtime.sidecar.solving import solve_job

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 1.0
_NICENESS = 5


def main(arguments: list[str]) -> int:
    """Serve jobs until the parent closes the pipe.

    Args:
        arguments: the parent's process id; ``module:function`` of the builder; and ``bound`` if the parent's main
            thread started this process, else ``free``.
    """
    parent, build_path, binding = int(arguments[0]), arguments[1], arguments[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer; this process ends with the pipe
    _end_with(parent, bound=binding == "bound")
    os.nice(_NICENESS)
    jobs, answers = _private_pipes()
    import snip_megatron.solver.exact  # noqa: F401  loads OR-Tools before the first job

    while (frame := read_frame(jobs)) is not None:
        number, payload = frame
        try:
            write_frame(answers, number, b"")  # acknowledges that the job was read: it now fails with this process
            write_frame(answers, number, pickle.dumps(_answer(payload, build_path), protocol=5))
        except BrokenPipeError:  # the trainer has closed its end
            os._exit(1)
    return 0


def _answer(payload: bytes, build_path: str) -> SidecarResult:
    """Build and solve. Any error becomes a failure."""
    try:
        job: SolveJob = pickle.loads(payload)
        return solve_job(job, build_path)
    except MemoryError:
        return SidecarResult(failure=SidecarFailure("oom", "the solver process ran out of memory"))
    except SnipError as error:
        return SidecarResult(failure=SidecarFailure("exception", str(error)))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        return SidecarResult(failure=SidecarFailure("exception", f"{text} ({place})", traceback.format_exc()))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the streams of jobs and answers on new descriptors, and redirect standard output to standard error."""
    jobs = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return jobs, answers


def _end_with(parent: int, *, bound: bool) -> None:
    """Make this process end with its parent.

    The kernel's parent-death signal also ends a stopped process. It is sent when the *thread* that started this process
    ends, so it is used only if that is the parent's main thread (``bound``). A watching thread covers all other cases.
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
