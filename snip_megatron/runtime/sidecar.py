"""Rank 0's end of the solver processes: a thread that starts one for each job and exchanges pickles with it.

The training thread waits for neither. The process pools of the standard library are no alternative, because they import
the main module of the training a second time.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

from snip_megatron.runtime.solving import SidecarResult, SolveJob

SOLVE = "snip_megatron.runtime.solving:solve_job"
_WORKER = "import sys; from snip_megatron.runtime.solving import main; sys.exit(main(*sys.argv[1:]))"
_CLOSE_S = 2.0  # a process that is killed ends in milliseconds, unless it hangs in the kernel
# Variables of torchrun, SLURM and NCCL, from which libraries would conclude that the process is a rank.
_RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "GROUP_", "ROLE_", "PMI_", "PMIX_", "OMPI_")
_RANK_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "SLURM_PROCID")
)


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
        """Queue a job. :meth:`poll` returns its outcome. Raises RuntimeError after :meth:`close`."""
        if self._closed.is_set():
            raise RuntimeError("SidecarClient.submit after close")
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
            if self._process is not None and self._process.poll() is not None:  # it has ended while it waited
                self._replace(_reason(self._process.returncode))
            if self._process is None:
                self._start_process()
            result = self._exchange(payload, submitted + self._deadline)
            self._results.put(replace(result, version=version, latency_s=time.monotonic() - submitted))
            self._start_process()
        if self._process is not None:
            with self._process as process:
                process.kill()

    def _start_process(self) -> None:
        """Start a process, unless one waits for a job."""
        if self._closed.is_set() or self._process is not None:
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
            self.last_error = str(error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _exchange(self, payload: bytes, deadline: float) -> SidecarResult:
        """Give a job to the process, and return its answer or why there is none. The process has ended then."""
        if self._process is None:
            return SidecarResult(failure="died", message=self.last_error or "there is no solver process")
        result, failure, why = None, "died", "the solver process sent something that is no answer"
        with self._process as process:  # reaps it
            try:
                answer, _ = process.communicate(payload, timeout=max(0.0, deadline - time.monotonic()))
                if process.returncode:
                    why = _reason(process.returncode)
                else:
                    result = pickle.loads(answer)
            except subprocess.TimeoutExpired:
                failure, why = "deadline", f"no answer within {self._deadline:g} s; the solver process was killed"
            except Exception as error:  # unpickling may raise anything
                why += f" ({type(error).__name__})"
            finally:
                process.kill()  # SIGKILL also ends a stopped process
        if isinstance(result, SidecarResult):
            self._process = None
            return result
        self._replace(why)
        return SidecarResult(failure=failure, message=why)

    def _replace(self, why: str) -> None:
        """Note why a process ended without an answer. Another one takes its place."""
        self._process, self.last_error = None, why
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
