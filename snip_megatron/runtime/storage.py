"""File writes: those of a run never stop training, and those of a command end in one line.

A failed write of a run is kept in memory and tried again.

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
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from snip_megatron.precision.errors import SnipError

MAX_KEPT_BYTES = 64 * 2**20
"""Size limit of the failed writes that are kept. Beyond it, the oldest ones are dropped and counted."""
RETRY_S = 10.0
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
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    if durable:
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder, and the file is complete
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class Writer:
    """Writes the lines and the whole files of a run directory. No method raises an OSError.

    A write that fails is kept and tried again, after the earlier ones of its file, together with all that are kept.

    ``prepare`` is called before a file of lines is opened, at first and after it was removed or renamed.

    Attributes:
        failures: number of failed attempts. The first one is printed.
        lost: number of records that were dropped. The first loss is printed at once, and their number at the end.
    """

    def __init__(self, run: Path, prepare: Callable[[], None]) -> None:
        self._run = run
        self._prepare = prepare
        self.failures = self.lost = 0
        self.error = ""
        self._kept: deque[tuple[Path, Callable[[Path, bytes], None], bytes]] = deque()
        self._size = 0  # bytes of the kept writes
        self._retry_at = 0.0
        self._descriptors: dict[Path, int] = {}
        self._torn: set[Path] = set()  # files that end in a part of a line

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Append one record to a file of JSON lines."""
        self._put(path, self._append, (json.dumps(jsonable(record), allow_nan=False) + "\n").encode())

    def replace(self, path: Path, data: bytes, *, durable: bool = False) -> None:
        """Write a whole file; see :func:`write_atomically`."""
        self._put(path, partial(write_atomically, durable=durable), data)

    def _put(self, path: Path, write: Callable[[Path, bytes], None], data: bytes) -> None:
        self._kept.append((path, write, data))
        self._size += len(data)
        self.drain()
        while len(self._kept) > 1 and self._size > MAX_KEPT_BYTES:
            self._size -= len(self._kept.popleft()[-1])
            if not self.lost:
                self._say(f"more records wait than are kept: the oldest are lost from now on ({self.error})")
            self.lost += 1

    def drain(self, *, force: bool = False) -> None:
        """Try all writes that are kept. Without ``force``, nothing is tried for some time after a failure."""
        if not force and time.monotonic() < self._retry_at:
            return
        waiting, self._kept = self._kept, deque()
        failed: set[Path] = set()
        for path, write, data in waiting:
            try:
                if path not in failed:
                    write(path, data)
                    self._size -= len(data)
                    continue
            except OSError as error:
                self.failures, self.error = self.failures + 1, str(error)
                if self.failures == 1:
                    self._say(f"cannot write ({error}); training goes on, the records are kept and written later")
                failed.add(path)
            self._kept.append((path, write, data))
        if failed:
            self._retry_at = time.monotonic() + RETRY_S

    def close(self) -> None:
        """Try the kept writes a last time, report how many records were lost, and close the files."""
        self.drain(force=True)
        self.lost += len(self._kept)
        self._kept.clear()
        for path in list(self._descriptors):
            self._release(path)
        if self.lost:
            self._say(f"{self.lost} records were lost ({self.error})")

    def _say(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            print(f"snip: run directory {self._run}: {message}", file=sys.stderr, flush=True)

    # -- lines -------------------------------------------------------------------------------------------------
    def _append(self, path: Path, line: bytes) -> None:
        try:
            descriptor = self._open(path)
            data = b"\n" + line if path in self._torn else line
            written = os.write(descriptor, data)
            if 0 < written < len(data):  # a full disk may take a part of the line
                self._torn.add(path)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self._torn.discard(path)
        except OSError:
            self._release(path)
            raise

    def _open(self, path: Path) -> int:
        """Return the open file: a new one if it was removed or renamed, so that later lines can be read."""
        if path in self._descriptors:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._descriptors[path]), os.stat(path)):
                    return self._descriptors[path]
            self._release(path)
            self._torn.discard(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._prepare()
        self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        return self._descriptors[path]

    def _release(self, path: Path) -> None:
        if path in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop(path))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines.

    Torn lines (after a crash or on a full disk) are skipped. A missing file has no records. Raises SnipError if it
    cannot be read.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SnipError(f"{path}: cannot be read: {error.strerror}") from None
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
    """Keep the records before training step ``step``, append the others to ``<path>.1``, and return their number.

    The event ``validation`` of ``step`` itself is kept: Megatron validates before it saves, and does not validate again
    after a load. The tail is saved before the file is replaced, so that a crash in between loses nothing.
    Raises OSError if a file cannot be read or written.
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


# -- output files of commands ------------------------------------------------------------------------------------
def check_folder(argument: str, path: Path | None) -> None:
    """Check that an output file can be made, so that a command fails before it computes anything.

    Raises SnipError naming ``argument`` if ``path`` is a folder, or its own folder is missing or cannot be written.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if os.path.isdir(path):  # False for a name that is too long, where Path.is_dir raises
        raise SnipError(f"{argument} {path}: is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise SnipError(f"{argument} {path}: there is no folder {folder}")
    if not is_special(path) and not os.access(folder, os.W_OK):
        raise SnipError(f"{argument} {path}: the folder {folder} cannot be written")


def write_output(path: Path, data: bytes) -> None:
    """Write ``data`` by :func:`write_atomically`, or straight into ``path`` if it is a pipe or a device.

    A rename would put a file in the place of ``/dev/null``. Raises OSError if ``path`` cannot be written.
    """
    if not is_special(path):
        write_atomically(path, data)
        return
    path.write_bytes(data)


def deliver(argument: str, path: Path | None, text: str) -> None:
    """Write ``text`` to ``path``, or to standard output if that is None. Raises SnipError naming ``argument``."""
    if path is None:
        print(text, end="")
        return
    if os.path.isdir(path):
        raise SnipError(f"{argument} {path}: is a folder; name a file in it")
    try:
        write_output(path, text.encode(errors="replace"))
    except OSError as error:
        raise SnipError(f"{argument} {path}: cannot be written: {error.strerror}") from None


def is_special(path: Path) -> bool:
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
