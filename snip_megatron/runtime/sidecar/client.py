"""Rank 0's end of the sidecar. No method waits for the solver process."""

from __future__ import annotations

import pickle
import queue
import time
from collections import deque
from dataclasses import dataclass, replace

from snip_megatron.runtime.sidecar.messages import SidecarFailure, SidecarResult, SolveJob
from snip_megatron.runtime.sidecar.process import WorkerProcess

BUILD = "snip_megatron.sensitivity.problem:build_problem"
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True)
class _Ticket:
    """A submitted job. ``submitted`` is its time by the monotonic clock."""

    number: int
    version: int
    payload: bytes
    submitted: float
    returned: bool = False
    """Whether a process died before it had read the job."""


class SidecarClient:
    """Starts the solver process, sends it one job at a time, and replaces it if it dies or hangs.

    ``submit`` and ``poll`` take milliseconds in any state of the process. A job fails if its process dies after it has
    read the job. A job that the process had not read is given to the next process, once. Waiting jobs are not affected.
    The next process starts after a pause, which doubles up to a minute and is reset by an answer.

    All methods must be called from one thread. If it is the main thread, the process ends with a parent that is killed
    even while the process itself is stopped.

    Args:
        restart_backoff_s: the first pause in seconds.
        deadline_s: seconds after ``submit`` until a job without an answer fails and its process is killed.
        build: ``module:function``. The function takes (table, request) and returns a Problem, or (Problem, scores).
    """

    def __init__(self, *, restart_backoff_s: float = 1.0, deadline_s: float = 600.0, build: str = BUILD) -> None:
        if not (restart_backoff_s >= 0 and deadline_s > 0):
            raise ValueError(f"restart_backoff_s {restart_backoff_s} or deadline_s {deadline_s} is out of range")
        self._first_backoff, self._deadline, self._build = restart_backoff_s, deadline_s, build
        self._backoff = restart_backoff_s
        self._worker: WorkerProcess | None = None
        self._started = False
        self._not_before = 0.0
        self._numbers = 0
        self._waiting: deque[_Ticket] = deque()
        self._running: _Ticket | None = None
        self._results: deque[SidecarResult] = deque()
        self.restarts = 0
        """Number of processes that were started to replace another."""
        self.last_error: str | None = None
        """Why there was no process the last time that one was missing; None if one was never missing."""

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return None if self._worker is None else self._worker.pid

    def start(self) -> None:
        """Start the process, which loads its modules while training starts."""
        if not self._started:
            self._started = True
            self._launch()

    def submit(self, job: SolveJob) -> None:
        """Queue a job. :meth:`poll` returns its outcome."""
        if not self._started:
            raise RuntimeError("SidecarClient.submit before start, or after close")
        self._numbers += 1
        ticket = _Ticket(self._numbers, job.request.version, pickle.dumps(job, protocol=5), time.monotonic())
        self._waiting.append(ticket)
        self._advance()

    def poll(self) -> SidecarResult | None:
        """Return the oldest outcome that has not been returned, or None. Also detects deaths and passed deadlines."""
        if self._started:
            self._receive()
            self._check_deadlines()
            self._advance()
        return self._results.popleft() if self._results else None

    def close(self) -> None:
        """End the process. Jobs without an answer are dropped."""
        self._started = False
        self._waiting.clear()
        self._running = None
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _receive(self) -> None:
        while self._worker is not None:
            try:
                number, arrived, answer = self._worker.answers.get_nowait()
            except queue.Empty:
                return
            if answer is None:
                how = self._worker.how_it_ended()
                self._settle_running(self._worker, how)
                self._lose_worker(how)
            elif self._running is not None and number == self._running.number:
                latency = arrived - self._running.submitted
                self._results.append(replace(answer, version=self._running.version, latency_s=latency))
                self._running = None
                self._backoff = self._first_backoff

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        message = f"no answer within {self._deadline:g} s"
        if self._running is not None and now - self._running.submitted > self._deadline:
            assert self._worker is not None
            self._worker.kill()
            self._fail(self._running, SidecarFailure("deadline", f"{message}; the solver process was killed"))
            self._lose_worker(message)
        while self._waiting and now - self._waiting[0].submitted > self._deadline:
            self._fail(self._waiting.popleft(), SidecarFailure("deadline", f"{message}; it was still queued"))

    def _advance(self) -> None:
        """Start a process if one is due, and send the next job if the process is idle."""
        if self._worker is None and time.monotonic() >= self._not_before and self._launch():
            self.restarts += 1
        if self._worker is not None and self._running is None and self._waiting:
            self._running = self._waiting.popleft()
            self._worker.send(self._running.number, self._running.payload)

    def _launch(self) -> bool:
        """Start a process. If that fails, jobs keep waiting and the start is tried again after the pause."""
        try:
            self._worker = WorkerProcess(self._build)
        except OSError as error:
            self.last_error = str(error)
            self._pause()
        return self._worker is not None

    def _pause(self) -> None:
        self._not_before = time.monotonic() + self._backoff
        self._backoff = min(max(2 * self._backoff, 0.01), MAX_BACKOFF_S)

    def _settle_running(self, worker: WorkerProcess, how: str) -> None:
        """Fail the job of a process that ended, or return it to the queue if the process had not read it.

        A check before sending a job would not be reliable: a killed process counts as alive until all of its threads
        have left the kernel.
        """
        if self._running is None:
            return
        if self._running.returned or worker.begun == self._running.number:
            self._fail(self._running, SidecarFailure("died", how))
        else:
            self._waiting.appendleft(replace(self._running, returned=True))

    def _lose_worker(self, why: str) -> None:
        self.last_error = why
        self._worker = None
        self._running = None
        self._pause()

    def _fail(self, ticket: _Ticket, failure: SidecarFailure) -> None:
        latency = time.monotonic() - ticket.submitted
        self._results.append(SidecarResult(ticket.version, failure, latency_s=latency))
