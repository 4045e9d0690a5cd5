"""The lock of a run directory, ``lock.json``: it names the process that writes there, and keeps a second job out.

The lock of a job that was killed stays. It is stale if its process is gone, which only its own host can see. From
another host it is stale if it belongs to an earlier start of the same job, or if nothing was written for
:data:`SILENT_S`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.runtime.records.readers import EVENTS, METRICS
from snip_megatron.runtime.records.storage import dump_json

LOCK = "lock.json"
SCHEMA = "snip.lock/1"
SILENT_S = 900.0
"""A job on another host that has written nothing for so long counts as dead. Compiling and saving take less."""


@dataclass(frozen=True)
class Lock:
    """Who writes a run directory: a process id on a host, and when the process started, since ids are used again.

    ``job`` is the id of the SLURM job or of torchrun's rendezvous; None without one.
    """

    host: str
    process: int
    born: int
    job: str | None

    @classmethod
    def own(cls) -> Lock:
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
        return cls(socket.gethostname(), os.getpid(), _born(os.getpid()) or 0, None if job in ("", "none") else job)

    @property
    def here(self) -> bool:
        """Whether the process is, or was, one of this host."""
        return self.host == socket.gethostname()

    @property
    def gone(self) -> bool:
        """Whether the process is one of this host and has ended."""
        return self.here and _born(self.process) != self.born

    @property
    def mine(self) -> bool:
        return self == replace(Lock.own(), job=self.job)

    def stale(self, run: Path) -> bool:
        """Return whether this process may take the lock of ``run`` over."""
        if self.here:
            return self.gone or self.mine
        if self.job is not None and self.job == Lock.own().job:  # queued again, or restarted on another host
            return True
        return time.time() - (last_write(run) or 0.0) > SILENT_S

    def __str__(self) -> str:
        job = "" if self.job is None else f" of job {cut(self.job)}"
        return f"process {self.process}{job} on {cut(self.host)}"


def read_lock(run: Path) -> Lock | None:
    """Return the lock of a run directory; None if there is none, or it cannot be read."""
    try:
        body = json.loads((run / LOCK).read_text(encoding="utf-8"))
        return Lock(str(body["host"]), int(body["process"]), int(body["born"]), body["job"] and str(body["job"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def last_write(run: Path) -> float | None:
    """Return when a job last wrote to a run directory, in Unix seconds; None if never."""
    found = []
    for name in (LOCK, EVENTS, METRICS):
        with contextlib.suppress(OSError):
            found.append((run / name).stat().st_mtime)
    return max(found, default=None)


def check_lock(run: Path) -> None:
    """Raise SnipError if another job writes the run directory."""
    other = read_lock(run)
    if other is None or other.stale(run):
        return
    ago = max(0.0, time.time() - (last_write(run) or 0.0))
    why = "which still runs" if other.here else f"whose last write is {ago:.0f} s old"
    remedy = "" if other.here else f"; if it is dead, remove {run / LOCK}"
    raise SnipError(f"run directory {run}: belongs to {other}, {why}; end it or choose another --snip-dir{remedy}")


def take_lock(run: Path) -> None:
    """Make this process the one that writes the run directory, until it ends or calls :func:`release_lock`.

    Raises SnipError if another job writes there, and OSError if the lock cannot be written.
    """
    check_lock(run)
    run.mkdir(parents=True, exist_ok=True)
    (run / LOCK).unlink(missing_ok=True)
    body = {"schema": SCHEMA, **asdict(Lock.own()), "time": round(time.time(), 3)}
    try:
        with (run / LOCK).open("x", encoding="utf-8") as file:
            file.write(dump_json(body))
    except FileExistsError:
        raise SnipError(f"run directory {run}: another job begins to write there; choose another --snip-dir") from None
    atexit.register(release_lock, run)


def release_lock(run: Path) -> None:
    found = read_lock(run)
    if found is not None and found.mine:
        with contextlib.suppress(OSError):
            (run / LOCK).unlink()


def _born(process: int) -> int | None:
    """Return the start of a process in clock ticks since the host's; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except (OSError, ValueError):
        return None
