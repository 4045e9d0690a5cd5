"""Rank 0's end of the sidecar: a thread that starts the solver process and talks to it. Training waits for neither.

Jobs and answers are pickles on the standard input and output of the process, which nobody else holds. The process pools
of the standard library would import the main module of the training once more.
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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from snip_megatron.runtime.solving import SidecarResult, SolveJob

SOLVE = "snip_megatron.runtime.solving:solve_job"
_WORKER = "import sys; from snip_megatron.runtime.solving import main; sys.exit(main(*sys.argv[1:]))"
_MAX_BACKOFF_S = 60.0
_REAP_S = 1.0  # a process that ends or is killed needs milliseconds, unless it hangs in the kernel
# Variables of torchrun, SLURM and NCCL, which would make libraries take the process for a rank.
_RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "GROUP_", "ROLE_", "PMI_", "PMIX_", "OMPI_")
_RANK_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "SLURM_PROCID")
)


class _Ticket(NamedTuple):
    version: int
    payload: bytes
    submitted: float


class SidecarClient:
    """Keeps a solver process running, and gives it one job after the other.

    A job fails if its process dies, or does not answer within ``deadline_s`` and is killed. Jobs behind it wait for the
    next process, which starts after a pause of ``restart_backoff_s``, doubled up to a minute until there is an answer.
    ``solve`` is the ``module:function`` that the process calls for each job. ``restarts`` counts processes that
    replaced another; ``last_error`` is why there was none the last time that one was missing.
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
        """The process id; None while there is no process."""
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
        """Return the oldest outcome that has not been returned, or None. Kills a process that missed its deadline."""
        ticket, process = self._running, self._process
        if ticket is not None and process is not None and self._is_late(ticket):
            process.kill()  # the thread, which waits for its answer, notices
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
        self._has_process()
        while (ticket := self._jobs.get()) is not None and not self._closed.is_set():
            while not (ready := self._has_process()) and not self._is_late(ticket) and not self._closed.is_set():
                pass
            result = self._ask(ticket) if ready else self._failure(ticket)
            self._results.put(replace(result, version=ticket.version, latency_s=time.monotonic() - ticket.submitted))
            self._has_process()  # another one loads its modules before the next job
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _has_process(self) -> bool:
        """Return whether the process runs. If there is none it is started, after a pause unless it is the first one."""
        if self._process is not None:
            if self._process.poll() is None:
                return True
            self.last_error = _end(self._process)
            self._process = None
        if self.last_error is not None:
            self._closed.wait(self._backoff)
            self._backoff = min(max(2 * self._backoff, 0.01), _MAX_BACKOFF_S)
        if self._closed.is_set():
            return False
        command = [sys.executable, "-c", _WORKER, str(os.getpid()), self._solve]
        pipe, environment = subprocess.PIPE, _worker_environment()
        try:
            with blocked_in_children():  # SIGTERM is for the ranks, which save a checkpoint
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        except OSError as error:  # the host is out of processes or memory
            self.last_error = str(error)
            return False
        self.restarts += self.last_error is not None
        return True

    def _ask(self, ticket: _Ticket) -> SidecarResult:
        """Return the outcome of a job. Unless it is the process's answer, the process has ended afterwards."""
        process, garbage = self._process, False
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._running = ticket
        try:
            process.stdin.write(ticket.payload)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
            if isinstance(answer, SidecarResult):
                self._backoff = self._first_backoff
                return answer
            garbage = True
        except (EOFError, OSError):
            pass
        except Exception:  # unpickling may raise anything
            garbage = True
        finally:
            self._running = None
        self.last_error = _end(process)
        self._process = None
        if garbage:
            self.last_error = "the solver process sent something that is no answer; it was killed"
        return self._failure(ticket)

    def _failure(self, ticket: _Ticket) -> SidecarResult:
        kind = "died"
        if self._is_late(ticket):
            kind = "deadline"
            self.last_error = f"no answer within {self._deadline:g} s; the solver process was killed"
        return SidecarResult(failure=kind, message=self.last_error or "there is no solver process")


def _worker_environment() -> dict[str, str]:
    """Return this process's environment without variables of a rank, without devices, and with its module path."""
    kept = {k: v for k, v in os.environ.items() if k not in _RANK_NAMES and not k.startswith(_RANK_PREFIXES)}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


def _end(process: subprocess.Popen[bytes]) -> str:
    """Reap a process that has ended, or kill it. Returns one line about its end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_REAP_S)  # its pipe closes a little before it ends
    process.kill()  # SIGKILL also ends a stopped process; one that has ended does not get it
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):
            stream.close()
    try:
        code = process.wait(timeout=_REAP_S)
    except subprocess.TimeoutExpired:
        return "the solver process hangs in the kernel"
    if code >= 0:
        return f"the solver process ended with exit code {code}"
    hint = " (the kernel does this when memory runs out)" if code == -signal.SIGKILL else ""
    return f"the solver process was killed by {signal.Signals(-code).name}{hint}"


@contextlib.contextmanager
def blocked_in_children(signals: Iterable[signal.Signals] = (signal.SIGTERM,)) -> Iterator[None]:
    """Block ``signals`` in every process that this thread starts in the meantime, for the life of that process.

    SLURM's ``proctrack/linuxproc`` sends the SIGTERM of a preemption to every process of a step. A rank has a handler
    for it and saves a checkpoint; a helper would die, and the rank then fail in the middle of its save.

    A process inherits the signal mask of the thread that starts it. The mask also survives ``exec``, so that no moment
    remains in which the process has no protection. A signal to this process in the meantime is delivered afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
