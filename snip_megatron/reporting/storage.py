"""Writing that never stops training: JSON lines and whole files whose failed writes are kept and tried again.

A line is one ``write()`` of one complete line to a file opened with O_APPEND; a whole file is written beside its place
and renamed. Values are made valid JSON first: NaN and Inf become null, numpy and torch values plain numbers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

MAX_PENDING_BYTES = 32 * 2**20
"""Bytes of failed writes that one queue keeps for later; beyond that the oldest are dropped and counted."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
_MAX_DEPTH = 32


def jsonable(value: Any, depth: int = 0) -> Any:
    """``value`` as what ``json`` writes as valid JSON: NaN and ±Inf become None, unknown types their ``str``."""
    if value is None or isinstance(value, (bool, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return jsonable(value.value, depth + 1)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(jsonable(k)): jsonable(v, depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [jsonable(v, depth + 1) for v in value]
        if callable(tolist := getattr(value, "tolist", None)):  # numpy scalars and arrays, torch tensors
            return jsonable(tolist(), depth + 1)
    return str(value)


def dump_json(value: Any) -> str:
    """Indented, valid JSON text with a final newline."""
    return json.dumps(jsonable(value), indent=1, allow_nan=False) + "\n"


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename; a reader sees the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class Faults:
    """Remembers failed writes and says so once on standard error."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.count = 0
        self.lost = 0
        self.last_error: str | None = None

    def remember(self, error: OSError) -> None:
        """Count a failed write; the first one is reported."""
        self.count += 1
        self.last_error = str(error)
        if self.count == 1:
            self._say(f"cannot write ({error}); training goes on, the records are kept and written later")

    def report_loss(self) -> None:
        """Say how many records were never written."""
        if self.lost:
            self._say(f"{self.lost} records were lost ({self.last_error})")

    def _say(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            print(f"snip: run directory {self.where}: {message}", file=sys.stderr, flush=True)


class WriteQueue:
    """Writes now, or keeps the write and tries again later with back-off.

    With ``ordered`` a failed write holds back those behind it, so that lines keep their order.
    """

    def __init__(self, faults: Faults, *, ordered: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._faults = faults
        self._ordered = ordered
        self._clock = clock
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0
        self._retry_at = 0.0
        self._back_off = FIRST_RETRY_S

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Callable[[], None], size: int) -> None:
        """Run ``job`` (which may raise OSError) now if nothing stands in its way, otherwise keep it."""
        self._jobs.append((size, job))
        self._bytes += size
        self.drain()
        while self._bytes > MAX_PENDING_BYTES and len(self._jobs) > 1:
            self._bytes -= self._jobs.popleft()[0]
            self._faults.lost += 1

    def drain(self, *, force: bool = False) -> None:
        """Try the kept writes once; within the back-off only with ``force``."""
        if not self._jobs or (not force and self._clock() < self._retry_at):
            return
        failed: deque[tuple[int, Callable[[], None]]] = deque()
        while self._jobs and not (failed and self._ordered):
            size, job = self._jobs.popleft()
            try:
                job()
                self._bytes -= size
            except OSError as error:
                self._faults.remember(error)
                failed.append((size, job))
        self._jobs.extendleft(reversed(failed))
        if failed:
            self._retry_at = self._clock() + self._back_off
            self._back_off = min(2 * self._back_off, LAST_RETRY_S)
        else:
            self._retry_at, self._back_off = 0.0, FIRST_RETRY_S

    def abandon(self) -> None:
        """Count what is left as lost."""
        self._faults.lost += len(self._jobs)
        self._jobs.clear()
        self._bytes = 0


class LineFile:
    """A file of JSON lines that only grows by whole lines."""

    def __init__(self, path: Path, faults: Faults) -> None:
        self._path = path
        self._queue = WriteQueue(faults, ordered=True)
        self._descriptor: int | None = None
        self._torn = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record; never raises on an I/O error."""
        line = (json.dumps(jsonable(record), allow_nan=False) + "\n").encode()
        self._queue.put(lambda: self._write(line), len(line))

    def flush(self) -> None:
        """Try the kept lines now."""
        self._queue.drain(force=True)

    def close(self) -> None:
        """Try the kept lines a last time and close."""
        self.flush()
        self._queue.abandon()
        self._release()

    def _write(self, line: bytes) -> None:
        try:
            if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
                self._release()  # somebody removed the file: what is written from now on must be seen again
                self._torn = False
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            size = os.fstat(self._descriptor).st_size
            data = b"\n" + line if self._torn else line
            if os.write(self._descriptor, data) != len(data):
                # A disk that fills up takes part of a line: take that part back, or close the torn line with a newline.
                self._torn = True
                os.ftruncate(self._descriptor, size)
                self._torn = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._torn = False
        except OSError:
            self._release()
            raise

    def _release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; a torn line (crash, full disk) and a missing file are no error."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    return [record for line in raw.split(b"\n") if (record := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """One line's object with an integer ``step``, or None if it is torn or something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record


def cut_back(path: Path, step: int) -> int:
    """Keep the records before training step ``step``; append the others to ``<path>.1``. Returns how many were cut.

    Raises OSError. A crash in between leaves the old file whole: the tail is saved before the head replaces it.
    """
    if not path.exists():
        return 0
    head: list[bytes] = []
    tail: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        record = parse_line(line)
        whole = record is not None and line.endswith(b"\n")
        (head if whole and record is not None and record["step"] < step else tail).append(line)
    if tail:
        if not tail[-1].endswith(b"\n"):
            tail[-1] += b"\n"
        with path.with_name(path.name + ".1").open("ab") as kept:
            kept.writelines(tail)
        write_atomically(path, b"".join(head))
    return len(tail)
