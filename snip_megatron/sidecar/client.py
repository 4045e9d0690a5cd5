"""Rank 0's end of the sidecar: submit, poll, never wait."""

from __future__ import annotations

import pickle
import queue
import time
from collections import deque
from dataclasses import dataclass

from snip_megatron.sidecar.messages import Answer, SidecarFailure, SidecarResult, SolveJob
from snip_megatron.sidecar.process import WorkerProcess

BUILD = "snip_megatron.sensitivity.problem:build_problem"
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True)
class _Ticket:
    """A submitted job."""

    number: int
    version: int
    payload: bytes
    submitted: float


class SidecarClient:
    """Starts the solver process, feeds it one job at a time and replaces it when it dies or hangs.

    No method waits for the process: ``submit`` and ``poll`` take milliseconds whatever it does. A job whose process
    dies fails (its successors do not); the next process starts after a pause that doubles up to a minute and is reset
    by an answer. Use it from one thread; from the main thread if the process shall also end with a parent that is
    killed while the process itself is stopped.

    Args:
        restart_backoff_s: the first pause.
        deadline_s: seconds after ``submit`` until a job without an answer fails and its process is killed.
        build: ``module:function``; the function takes (table, request) and returns a Problem, or (Problem, scores).
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
        """How many times a process was started in place of another."""
        self.last_error: str | None = None
        """Why no process could be started, the last time that happened."""

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return None if self._worker is None else self._worker.pid

    def start(self) -> None:
        """Start the process; it loads while training starts."""
        if not self._started:
            self._started = True
            self._launch()

    def submit(self, job: SolveJob) -> None:
        """Queue a job; its outcome comes out of :meth:`poll`."""
        if not self._started:
            raise RuntimeError("SidecarClient.submit before start, or after close")
        self._numbers += 1
        ticket = _Ticket(self._numbers, job.request.version, pickle.dumps(job, protocol=5), time.monotonic())
        self._waiting.append(ticket)
        self._advance()

    def poll(self) -> SidecarResult | None:
        """The outcome of the oldest job that has one, else None. Also where death and deadlines are noticed."""
        if self._started:
            self._receive()
            self._check_deadlines()
            self._advance()
        return self._results.popleft() if self._results else None

    def close(self) -> None:
        """End the process; jobs without an answer are forgotten."""
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
                message = self._worker.how_it_ended()
                self._lose_worker(SidecarFailure("died", message))
            elif self._running is not None and number == self._running.number:
                self._results.append(_result(self._running, answer, arrived))
                self._running = None
                self._backoff = self._first_backoff

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        message = f"no answer within {self._deadline:g} s"
        if self._running is not None and now - self._running.submitted > self._deadline:
            assert self._worker is not None
            self._worker.kill()
            self._lose_worker(SidecarFailure("deadline", f"{message}; the solver process was killed"))
        while self._waiting and now - self._waiting[0].submitted > self._deadline:
            self._fail(self._waiting.popleft(), SidecarFailure("deadline", f"{message}; it was still queued"))

    def _advance(self) -> None:
        """Start a process if one is due, send the next job if it is idle."""
        if self._worker is None and time.monotonic() >= self._not_before and self._launch():
            self.restarts += 1
        if self._worker is None or self._running is not None or not self._waiting:
            return
        if self._worker.has_ended():  # its pipe has not said so yet: the job is the next process's
            self._lose_worker(SidecarFailure("died", self._worker.how_it_ended()))
        else:
            self._running = self._waiting.popleft()
            self._worker.send(self._running.number, self._running.payload)

    def _launch(self) -> bool:
        """Start a process. Where the host has none to give, waiting jobs stay and it is tried again after the pause."""
        try:
            self._worker = WorkerProcess(self._build)
        except OSError as error:
            self.last_error = str(error)
            self._pause()
        return self._worker is not None

    def _pause(self) -> None:
        self._not_before = time.monotonic() + self._backoff
        self._backoff = min(max(2 * self._backoff, 0.01), MAX_BACKOFF_S)

    def _lose_worker(self, failure: SidecarFailure) -> None:
        """The process is gone: so is the job it had."""
        self._worker = None
        self._pause()
        if self._running is not None:
            self._fail(self._running, failure)
            self._running = None

    def _fail(self, ticket: _Ticket, failure: SidecarFailure) -> None:
        latency = time.monotonic() - ticket.submitted
        self._results.append(SidecarResult(ticket.version, failure, latency_s=latency))


def _result(ticket: _Ticket, answer: Answer, arrived: float) -> SidecarResult:
    solution = answer.solution
    return SidecarResult(
        version=ticket.version,
        failure=answer.failure,
        precision_map=None if solution is None else solution.to_precision_map(ticket.version),
        solution=solution,
        problem_json=answer.problem_json,
        scores=answer.scores,
        timings=answer.timings,
        latency_s=arrived - ticket.submitted,
    )
