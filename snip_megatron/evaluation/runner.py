"""A pool of training processes. Several run on each GPU at the same time, and a failed one is tried once more."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ATTEMPTS = 2
POLL_S = 0.2
GRACE_S = 20.0
MARGIN = 1.1
"""A run is started only if this multiple of the longest run so far fits before the time limit."""


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: name of the job.
        command: the command line.
        log: the file for its output.
        families: names shared with jobs of similar duration, the most similar first.
        before: called before each start.
        check: called after exit code 0; raises ValueError if the job is not a success.
    """

    name: str
    command: Sequence[str]
    log: Path
    families: tuple[str, ...] = ()
    before: Callable[[], None] | None = None
    check: Callable[[], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        job: the job.
        error: None after a success, else one line about the failure.
        seconds: duration of the last attempt.
        device: its CUDA device; None for the CPU.
    """

    job: Job
    error: str | None
    seconds: float
    device: str | None


@dataclass
class _Running:
    job: Job
    slot: int
    attempt: int
    started: float
    process: subprocess.Popen[bytes]


@dataclass
class Pool:
    """Runs jobs in a fixed number of slots.

    Args:
        devices: the CUDA device of each slot; None for the CPU.
        environment: additional environment variables of every process.
        deadline: the ``time.monotonic()`` by which all jobs must have ended; None for no limit. A job that is expected
            to end later is not started.
        expected: family → longest duration of its jobs so far, in seconds.
        stopped: whether :meth:`stop` was called.
    """

    devices: Sequence[str | None]
    environment: Mapping[str, str]
    deadline: float | None = None
    expected: dict[str, float] = field(default_factory=dict)
    stopped: bool = False
    _waiting: list[Job] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)
    _attempts: dict[str, int] = field(default_factory=dict)

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue jobs. The callbacks of :meth:`run` may also call it."""
        self._waiting += jobs

    def run(self, ended: Callable[[Outcome], None], progress: Callable[[], None] = lambda: None) -> int:
        """Run the queued jobs in their order.

        Args:
            ended: called with every outcome.
            progress: called several times a second.

        Returns:
            The number of jobs that were not run, or that were ended at the deadline or by :meth:`stop`.
        """
        try:
            while (self._waiting or self._running) and not self.stopped and not self._late():
                self._start()
                if not self._running:
                    break
                time.sleep(POLL_S)
                for running in [r for r in self._running if r.process.poll() is not None]:
                    self._running.remove(running)
                    self._ended(running, ended)
                progress()
        finally:
            self._waiting += [running.job for running in self._running]
            self._end_all()
        return len(self._waiting)

    def stop(self) -> None:
        """Make :meth:`run` end its processes and return."""
        self.stopped = True

    @property
    def busy(self) -> int:
        """Number of running processes."""
        return len(self._running)

    # -- start -------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        taken = {running.slot for running in self._running}
        free = [slot for slot in range(len(self.devices)) if slot not in taken]
        for job in [job for job in self._waiting if self._fits(job)][: len(free)]:
            self._waiting.remove(job)
            self._running.append(self._launch(job, self._emptiest(free)))
            free.remove(self._running[-1].slot)

    def _emptiest(self, free: list[int]) -> int:
        """Return a free slot of the device with the fewest processes."""
        load = [self.devices[running.slot] for running in self._running]
        return min(free, key=lambda slot: (load.count(self.devices[slot]), slot))

    def _fits(self, job: Job) -> bool:
        known = next((family for family in job.families if family in self.expected), None)
        if self.deadline is None or known is None:
            return True
        return time.monotonic() + MARGIN * self.expected[known] <= self.deadline

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _launch(self, job: Job, slot: int) -> _Running:
        if job.before is not None:
            job.before()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        device = self.devices[slot]
        environment = {**os.environ, **self.environment, "CUDA_VISIBLE_DEVICES": "" if device is None else device}
        with job.log.open("wb") as log:
            # The process leads a new process group, so that the whole group can be ended.
            process = subprocess.Popen(
                list(job.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
                close_fds=False,  # the lock of the working folder is inherited
            )
        self._attempts[job.name] = self._attempts.get(job.name, 0) + 1
        return _Running(job, slot, self._attempts[job.name], time.monotonic(), process)

    # -- end ---------------------------------------------------------------------------------------------------
    def _ended(self, running: _Running, ended: Callable[[Outcome], None]) -> None:
        seconds = time.monotonic() - running.started
        error = _error(running.job, running.process.returncode)
        for family in running.job.families if error is None else ():
            self.expected[family] = max(self.expected.get(family, 0.0), seconds)
        if error is not None and running.attempt < ATTEMPTS:
            running.job.log.replace(running.job.log.with_name(running.job.log.name + ".1"))
            self._waiting.insert(0, running.job)
            return
        ended(Outcome(running.job, error, seconds, self.devices[running.slot]))

    def _end_all(self) -> None:
        for running in self._running:
            _signal(running.process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        for running in self._running:
            try:
                running.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(running.process, signal.SIGKILL)
                running.process.wait()
        self._running.clear()


def _error(job: Job, code: int) -> str | None:
    if code == 0:
        try:
            if job.check is not None:
                job.check()
        except (ValueError, OSError, LookupError) as error:
            return str(error)
        return None
    return f"exit code {code}: {last_line(job.log)}"


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        process.poll()


def last_line(log: Path, size: int = 8192) -> str:
    """Return the last non-empty line of a log, which is the message of a Python error."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            lines: list[Any] = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return "no log"
    told = [line.strip() for line in lines if line.strip()]
    return str(told[-1])[:500] if told else "the log is empty"
