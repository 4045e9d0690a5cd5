"""File writes that never stop training. A failed write is kept in memory and tried again.

A JSON line is written by one ``write()`` call of one complete line to a file opened with O_APPEND, and not synced. A
whole file is written under a temporary name, synced and renamed. All values are converted to valid JSON first: NaN and
Inf become null, and NumPy and torch values become plain numbers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

MAX_PENDING_BYTES = 32 * 2**20
"""Size limit of the failed writes that one queue keeps. Beyond it, the oldest writes are dropped and counted."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
_MAX_DEPTH = 32


def jsonable(value: Any, depth: int = 0) -> Any:
    """Convert ``value`` to types that ``json`` writes as valid JSON.

    NaN and ±Inf become None. NumPy arrays and torch tensors become lists. Unknown types become their ``str``.
    """
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, (bool, str)):
        return value
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value of a nested mapping. An empty mapping is a value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and bool(value)
        found |= flatten(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def dump_json(value: Any) -> str:
    """Return ``value`` as indented, valid JSON text with a final newline."""
    return json.dumps(jsonable(value), indent=1, allow_nan=False) + "\n"


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write ``data`` to a temporary file in the same folder, sync it, and rename it to ``path``.

    A reader, and a machine that lost its power, sees the whole old file or the whole new one; with ``durable`` the new
    one if the function returned. Several processes may write the same file. Raises OSError if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if durable:
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder, and the file is complete
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@dataclass
class Faults:
    """Counts failed and lost writes. The first of either is reported on standard error, and all losses at the end."""

    where: Path
    count: int = 0
    lost: int = 0
    last_error: str | None = None

    def remember(self, error: OSError) -> None:
        """Count a failed write."""
        self.count += 1
        self.last_error = str(error)
        if self.count == 1:
            self._say(f"cannot write ({error}); training goes on, the records are kept and written later")

    def lose(self, count: int) -> None:
        """Count lost records. The first ones are reported at once."""
        if count and not self.lost:
            self._say(f"more records wait than are kept: the oldest are lost from now on ({self.last_error})")
        self.lost += count

    def report_loss(self) -> None:
        """Print how many records were never written, if any."""
        if self.lost:
            self._say(f"{self.lost} records were lost ({self.last_error})")

    def _say(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            print(f"snip: run directory {self.where}: {message}", file=sys.stderr, flush=True)


class WriteQueue:
    """Writes that are tried again with back-off if they fail.

    Args:
        faults: counts the failures.
        ordered: whether a failed write holds back those behind it, so that lines keep their order.
    """

    def __init__(self, faults: Faults, *, ordered: bool) -> None:
        self._faults = faults
        self._ordered = ordered
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0
        self._retry_at = 0.0
        self._back_off = FIRST_RETRY_S

    def put(self, job: Callable[[], None], size: int) -> None:
        """Add a write, which holds ``size`` bytes in memory and may raise OSError, and try the queue."""
        self._jobs.append((size, job))
        self._bytes += size
        self.drain()
        while self._bytes > MAX_PENDING_BYTES and len(self._jobs) > 1:
            self._bytes -= self._jobs.popleft()[0]
            self._faults.lose(1)

    def drain(self, *, force: bool = False) -> None:
        """Try every kept write once. During the back-off nothing is tried unless ``force`` is set."""
        if not self._jobs or (not force and time.monotonic() < self._retry_at):
            return
        failed: list[tuple[int, Callable[[], None]]] = []
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
            self._retry_at = time.monotonic() + self._back_off
        self._back_off = min(2 * self._back_off, LAST_RETRY_S) if failed else FIRST_RETRY_S

    def close(self) -> None:
        """Try the kept writes a last time, and count the others as lost."""
        self.drain(force=True)
        self._faults.lost += len(self._jobs)
        self._jobs.clear()


class LineFile(WriteQueue):
    """A file of JSON lines that grows by complete lines only.

    Args:
        path: the file.
        faults: counts failed writes.
        prepare: called before the file is opened, at first and after it was removed or renamed; may raise OSError.
    """

    def __init__(self, path: Path, faults: Faults, prepare: Callable[[], None]) -> None:
        super().__init__(faults, ordered=True)
        self._path = path
        self._prepare = prepare
        self._descriptor: int | None = None
        self._torn = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record. An I/O error is not raised; the line is kept and tried again."""
        line = (json.dumps(jsonable(record), allow_nan=False) + "\n").encode()
        self.put(lambda: self._write(line), len(line))

    def close(self) -> None:
        """Try the kept lines a last time and close the file."""
        super().close()
        self._release()

    def _write(self, line: bytes) -> None:
        try:
            descriptor = self._open()
            size = os.fstat(descriptor).st_size
            data = b"\n" + line if self._torn else line
            self._torn = os.write(descriptor, data) != len(data)
            if self._torn:
                # A full disk may accept a part of the line. Truncate that part. If truncation fails, the next write
                # begins with a newline, so that only this line is torn.
                os.ftruncate(descriptor, size)
                self._torn = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            self._release()
            raise

    def _open(self) -> int:
        """Return the open file: a new one if it was removed or renamed, so that later lines can be read."""
        if self._descriptor is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                    return self._descriptor
            self._release()
            self._torn = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._prepare()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        return self._descriptor

    def _release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines.

    Torn lines (after a crash or on a full disk) are skipped. A missing file has no records.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    return [record for line in raw.split(b"\n") if (record := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None if the line is torn or its object has no int64 ``step``."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and abs(step) < 2**63 else None


def cut_back(path: Path, step: int) -> int:
    """Keep the records before training step ``step`` and append the others to ``<path>.1``.

    The event ``validation`` of ``step`` itself is kept: Megatron validates before it saves, and does not validate again
    after a load. The tail is saved before the file is replaced, so that a crash in between loses nothing.

    Returns:
        The number of records that were moved.

    Raises:
        OSError: a file cannot be read or written.
    """
    if not path.exists():
        return 0
    head: list[bytes] = []
    tail: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        record = _parse_line(line) if line.endswith(b"\n") else None
        last = step if record is not None and record.get("event") == "validation" else step - 1
        (head if record is not None and record["step"] <= last else tail).append(line)
    if tail:
        if not tail[-1].endswith(b"\n"):
            tail[-1] += b"\n"
        with path.with_name(path.name + ".1").open("ab") as kept:
            kept.writelines(tail)
        write_atomically(path, b"".join(head))
    return len(tail)
