"""A pool of training processes. Several run on each GPU at the same time, and one that fails is tried once more,
unless its arguments are wrong.
"""

import contextlib
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from snip_megatron.precision.errors import SnipError, installed_version

PACKAGES = ("torch", "megatron-core", "triton", "ortools")
POLL_S = 0.2
GRACE_S = 20.0


@dataclass(frozen=True)
class Job:
    """One process, whose output goes to ``log``.

    ``before`` is called before each start, ``check`` after exit code 0; it raises ValueError if there is no success.
    """

    name: str
    command: Sequence[str]
    log: Path
    before: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """The end of a job: None or one line about its failure, and the seconds of the last attempt."""

    job: Job
    error: str | None
    seconds: float


@dataclass
class _Running:
    job: Job
    slot: int
    started: float
    process: subprocess.Popen[bytes]


@dataclass
class Pool:
    """Runs jobs in a fixed number of slots until the ``deadline``, a ``time.monotonic()`` or None. Each slot has its
    CUDA device of ``devices``, None for the CPU, and additional variables of the environment.
    """

    devices: Sequence[str | None]
    environment: Mapping[str, str]
    deadline: float | None = None
    stopped: bool = False
    _waiting: list[Job] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)
    _failed_once: set[str] = field(default_factory=set)

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue jobs. The callbacks of :meth:`run` may also call it."""
        self._waiting += jobs

    def run(self, ended: Callable[[Outcome], None], progress: Callable[[], None] = lambda: None) -> int:
        """Run the queued jobs in order: ``ended`` gets each outcome, ``progress`` is called several times a second.

        Returns the number of jobs that were not run, or that were ended at the deadline or by :meth:`stop`.
        """
        try:
            until = math.inf if self.deadline is None else self.deadline
            while (self._waiting or self._running) and not self.stopped and time.monotonic() < until:
                self._start()
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
        self.stopped = True

    @property
    def busy(self) -> int:
        return len(self._running)

    def _start(self) -> None:
        taken = {running.slot for running in self._running}
        free = [slot for slot in range(len(self.devices)) if slot not in taken]
        for slot in free[: len(self._waiting)]:
            self._running.append(self._launch(self._waiting.pop(0), slot))

    def _launch(self, job: Job, slot: int) -> _Running:
        job.before()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.environment, "CUDA_VISIBLE_DEVICES": self.devices[slot] or ""}
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
        return _Running(job, slot, time.monotonic(), process)

    def _ended(self, running: _Running, ended: Callable[[Outcome], None]) -> None:
        job, seconds = running.job, time.monotonic() - running.started
        code = running.process.returncode
        error = _error(job, code)
        again = code != SnipError.exit_code and job.name not in self._failed_once  # that code is of wrong arguments
        if error is not None and again:
            self._failed_once.add(job.name)
            print(f"{job.name} failed after {seconds:.0f} s and is tried again: {error}", file=sys.stderr, flush=True)
            job.log.replace(job.log.with_name(job.log.name + ".1"))
            self._waiting.append(job)  # behind the others: a full GPU has room again at the end
            return
        ended(Outcome(job, error, seconds))

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
    if code != 0:
        return f"exit code {code}: {last_line(job.log)}"
    try:
        job.check()
    except (ValueError, OSError, LookupError) as error:
        return str(error)
    return None


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log, which is the message of a Python error."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            output = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return "no log"
    lines = [line.strip() for line in output if line.strip()]
    return lines[-1][:500] if lines else "the log is empty"


# -- this machine --------------------------------------------------------------------------------------------------
def visible_gpus() -> list[str]:
    """Return the CUDA devices by their names in ``CUDA_VISIBLE_DEVICES``. No CUDA context is created."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if len(named) >= count else [str(i) for i in range(count)]


def describe(gpus: list[str]) -> dict[str, str]:
    """Return hardware, versions and commit, which every result contains."""
    hardware = f"{len(os.sched_getaffinity(0))} CPU cores ({platform.machine()})"
    if gpus:  # asking CUDA for the name would create a context in this process
        names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "GPU"
        hardware = f"{len(gpus)} × {names.splitlines()[0].strip()}, {hardware}"
    versions = {name: installed_version(name) or "not installed" for name in PACKAGES}
    return {"hardware": hardware, "python": platform.python_version(), **versions, "commit": _commit()}


def _commit() -> str:
    """Return the commit of the repository: the variable ``SNIP_COMMIT`` if it is set, else git's answer."""
    if named := os.environ.get("SNIP_COMMIT"):
        return named
    git = ("git", "-C", str(Path(__file__).resolve().parents[2]))
    head = _output(*git, "rev-parse", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return head + ("+changes" if changed else "") if head else "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
