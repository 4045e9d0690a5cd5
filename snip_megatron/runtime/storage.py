"""File writes: those of a run never stop training, and those of a command end in one line.

All values are converted to valid JSON first: NaN and Inf become null, and NumPy and torch values become plain numbers.
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

MAX_PENDING_BYTES = 64 * 2**20
"""Size limit of the failed writes that are tried again. Beyond it, the oldest ones are dropped and counted."""
RETRY_S = 10.0


def jsonable(value: Any) -> Any:
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
    if isinstance(value, Mapping):
        return {str(jsonable(k)): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    if callable(tolist := getattr(value, "tolist", None)):  # numpy scalars and arrays, torch tensors
        return jsonable(tolist())
    return str(value)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value of a nested mapping. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and bool(value)
        flat |= flatten(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def dump_json(value: Any) -> str:
    """Return ``value`` as indented, valid JSON text with a final newline."""
    return json.dumps(jsonable(value), indent=1, allow_nan=False) + "\n"


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write ``data`` to a temporary file in the same folder, sync it, and rename it to ``path``.

    A reader sees the whole old file or the whole new one, also after a loss of power. With ``durable`` it is the new
    one if this function has returned. Several processes may write the same file. Raises OSError if it cannot be
    written.
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

    A JSON line is one ``write()`` of one complete line to a file opened with O_APPEND. A whole file is written by
    :func:`write_atomically`. A write that fails waits in memory, and is tried again after the earlier ones of its file.

    Args:
        run: The run directory.
        prepare: Called before a file of lines is opened, and again if it was removed or renamed.

    Attributes:
        failures: Number of failed attempts. The first one is printed.
        lost: Number of records that were dropped. The first loss is printed at once, and their number at the end.
        error: The latest failure.
    """

    def __init__(self, run: Path, prepare: Callable[[], None]) -> None:
        self._run = run
        self._prepare = prepare
        self.failures = self.lost = 0
        self.error = ""
        self._pending: deque[tuple[Path, Callable[[Path, bytes], None], bytes]] = deque()
        self._pending_bytes = 0
        self._retry_at = 0.0
        self._descriptors: dict[Path, int] = {}
        self._torn: set[Path] = set()  # files that end in a part of a line

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Append one record to a file of JSON lines."""
        self._put(path, self._append, (json.dumps(jsonable(record), allow_nan=False) + "\n").encode())

    def replace(self, path: Path, data: bytes, *, durable: bool = False) -> None:
        """Write a whole file."""
        self._put(path, partial(write_atomically, durable=durable), data)

    def _put(self, path: Path, write: Callable[[Path, bytes], None], data: bytes) -> None:
        self._pending.append((path, write, data))
        self._pending_bytes += len(data)
        self.drain()
        while len(self._pending) > 1 and self._pending_bytes > MAX_PENDING_BYTES:
            self._pending_bytes -= len(self._pending.popleft()[-1])
            if not self.lost:
                self._warn(f"more records wait than are kept: the oldest are lost from now on ({self.error})")
            self.lost += 1

    def drain(self, *, force: bool = False) -> None:
        """Try all pending writes. Without ``force``, nothing is tried for :data:`RETRY_S` after a failure."""
        if not force and time.monotonic() < self._retry_at:
            return
        waiting, self._pending = self._pending, deque()
        failed: set[Path] = set()
        for path, write, data in waiting:
            try:
                if path not in failed:
                    write(path, data)
                    self._pending_bytes -= len(data)
                    continue
            except OSError as error:
                self.failures, self.error = self.failures + 1, str(error)
                if self.failures == 1:
                    self._warn(f"cannot write ({error}); training goes on, the records are kept and written later")
                failed.add(path)
            self._pending.append((path, write, data))
        if failed:
            self._retry_at = time.monotonic() + RETRY_S

    def close(self) -> None:
        """Try the pending writes a last time, report how many records were lost, and close the files."""
        self.drain(force=True)
        self.lost += len(self._pending)
        self._pending.clear()
        for path in list(self._descriptors):
            self._release(path)
        if self.lost:
            self._warn(f"{self.lost} records were lost ({self.error})")

    def _warn(self, message: str) -> None:
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
        """Return the descriptor of a file. If the file was removed or renamed, it is created again."""
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


# -- output files of commands ------------------------------------------------------------------------------------
def check_folder(argument: str, path: Path | None) -> None:
    """Check that an output file can be made, so that a command fails before it computes anything.

    Raises SnipError, which names ``argument``, if ``path`` is a folder, or its folder is missing or read-only.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if os.path.isdir(path):
        raise SnipError(f"{argument} {path}: is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise SnipError(f"{argument} {path}: there is no folder {folder}")
    if not (_is_special(path) or os.access(folder, os.W_OK)):
        raise SnipError(f"{argument} {path}: the folder {folder} cannot be written")


def deliver(argument: str, path: Path | None, text: str) -> None:
    """Write ``text`` to a file, a pipe or a device, or print it if ``path`` is None.

    Raises SnipError, which names ``argument``, if ``path`` cannot be written.
    """
    if path is None:
        print(text, end="")
        return
    data = text.encode(errors="replace")
    try:
        if _is_special(path):  # a rename would put a file in the place of /dev/null
            path.write_bytes(data)
        else:
            write_atomically(path, data)
    except OSError as error:
        raise SnipError(f"{argument} {path}: cannot be written: {error.strerror}") from None


def _is_special(path: Path) -> bool:
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
