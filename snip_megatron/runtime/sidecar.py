"""Rank 0's end of the solver process: a thread that starts the process and exchanges pickles with it over two pipes.

The training thread waits for neither. The process pools of the standard library are no alternative, because they import
the main module of the training a second time.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import NamedTuple

from snip_megatron.runtime.solving import SidecarResult, SolveJob

SOLVE = "snip_megatron.runtime.solving:solve_job"
_WORKER = "import sys; from snip_megatron.runtime.solving import main; sys.exit(main(*sys.argv[1:]))"
_MAX_BACKOFF_S = 60.0
_REAP_S = 1.0  # a process that ends or is killed needs milliseconds, unless it hangs in the kernel
# Variables of torchrun, SLURM and NCCL, from which libraries would conclude that the process is a rank.
_RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "GROUP_", "ROLE_", "PMI_", "PMIX_", "OMPI_")
_RANK_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "SLURM_PROCID")
)


class _Ticket(NamedTuple):
    version: int
    payload: bytes
    submitted: float  # time.monotonic()


class SidecarClient:
    """Keeps one solver process running and gives it one job after the other.

    A job fails if the process dies, or if it does not answer within the deadline and is killed. The next process starts
    after a pause, which doubles up to a minute until a process answers. Jobs behind a failed one wait for it.

    Args:
        restart_backoff_s: First pause before a process is started again, in seconds.
        deadline_s: Seconds from the submission of a job to its deadline.
        solve: The function that the process calls for each job, as ``module:function``.

    Attributes:
        restarts: Number of processes that replaced another.
        last_error: Why the latest process ended, in one line. None if none has.
    """

    def __init__(self, *, restart_backoff_s: float = 1.0, deadline_s: float = 600.0, solve: str = SOLVE) -> None:
        self._first_backoff = self._backoff = restart_backoff_s
        self._deadline, self._solve = deadline_s, solve
        self._jobs: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[SidecarResult] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._running: _Ticket | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="snip-sidecar", daemon=True)
        self.restarts = 0
        self.last_error: str | None = None

    @property
    def pid(self) -> int | None:
        """The process id. None while there is no process."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process, which loads its modules while training starts."""
        self._thread.start()

    def submit(self, job: SolveJob) -> None:
        """Queue a job. :meth:`poll` returns its outcome. Raises RuntimeError after :meth:`close`."""
        if self._closed.is_set():
            raise RuntimeError("SidecarClient.submit after close")
        self._jobs.put(_Ticket(job.request.version, pickle.dumps(job, protocol=5), time.monotonic()))

    def poll(self) -> SidecarResult | None:
        """Return the oldest outcome that has not been returned. None if there is none.

        A process that has missed its deadline is killed here.
        """
        ticket, process = self._running, self._process
        if ticket is not None and process is not None and self._is_late(ticket):
            process.kill()  # the thread, which reads its answer, notices
        return None if self._results.empty() else self._results.get()

    def close(self) -> None:
        """End the process. Jobs without an answer are dropped."""
        self._closed.set()
        self._jobs.put(None)
        if (process := self._process) is not None:
            process.kill()
        if self._thread.ident is not None:
            self._thread.join(2 * _REAP_S)

    def _is_late(self, ticket: _Ticket) -> bool:
        return time.monotonic() - ticket.submitted > self._deadline

    # -- the thread ------------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        self._ensure_process()
        while (ticket := self._jobs.get()) is not None and not self._closed.is_set():
            while not (running := self._ensure_process()) and not self._is_late(ticket) and not self._closed.is_set():
                pass
            result = (self._exchange(ticket) if running else None) or self._failure(ticket)
            self._results.put(replace(result, version=ticket.version, latency_s=time.monotonic() - ticket.submitted))
            self._ensure_process()  # which loads its modules before the next job
        if self._process is not None:
            self._end_process()

    def _ensure_process(self) -> bool:
        """Start a process if none runs, after a pause unless it is the first one. Returns whether one runs."""
        if self._process is not None:
            if self._process.poll() is None:
                return True
            self._end_process()
        if self.last_error is not None:
            self._closed.wait(self._backoff)
            self._backoff = min(max(2 * self._backoff, 0.01), _MAX_BACKOFF_S)
        if self._closed.is_set():
            return False
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
            return False
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.restarts += self.last_error is not None
        return True

    def _exchange(self, ticket: _Ticket) -> SidecarResult | None:
        """Return the process's answer to a job. None if there is none, and the process has been ended."""
        process, answer, ended = self._process, None, False
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._running = ticket
        try:
            process.stdin.write(ticket.payload)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except Exception as error:  # unpickling may raise anything
            ended = isinstance(error, EOFError | OSError)
        finally:
            self._running = None
        if isinstance(answer, SidecarResult):
            self._backoff = self._first_backoff
            return answer
        self._end_process()
        if not ended:
            self.last_error = "the solver process sent something that is no answer; it was killed"
        return None

    def _failure(self, ticket: _Ticket) -> SidecarResult:
        if self._is_late(ticket):
            self.last_error = f"no answer within {self._deadline:g} s; the solver process was killed"
            return SidecarResult(failure="deadline", message=self.last_error)
        return SidecarResult(failure="died", message=self.last_error or "there is no solver process")

    def _end_process(self) -> None:
        """Reap the process, which is killed if it runs, and set ``last_error``."""
        process, self._process = self._process, None
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_REAP_S)  # its pipe closes a little before it ends
        process.kill()  # SIGKILL also ends a stopped process
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        code = process.wait()
        if code >= 0:
            self.last_error = f"the solver process ended with exit code {code}"
            return
        hint = " (the kernel does this when memory runs out)" if code == -signal.SIGKILL else ""
        self.last_error = f"the solver process was killed by {signal.Signals(-code).name}{hint}"


def _worker_environment() -> dict[str, str]:
    """Return this process's environment without variables of a rank and without devices, with its module path."""
    shared = {k: v for k, v in os.environ.items() if k not in _RANK_NAMES and not k.startswith(_RANK_PREFIXES)}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return shared | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
