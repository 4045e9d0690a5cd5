"""File writes: training never waits for those of a run, and those of a command end in one line.

All values are converted to valid JSON first: NaN and Inf become null, and NumPy and torch values become plain numbers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from snip_megatron.precision.errors import SnipError

MAX_BYTES, MAX_RECORDS = 64 * 2**20, 65_536
"""Limits of the records that wait to be written. Those that do not fit are dropped and counted."""
RETRY_S, STALL_S = 10.0, 30.0
"""Seconds until a failed write is tried again, and without a write until a line says so."""
EXIT_S, FINISH_S = 30.0, 60.0
"""Seconds at exit for the records that wait, and for what follows them: the summary and the report."""


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


class _Record(NamedTuple):
    path: Path
    write: Callable[[Path, bytes], None]
    data: bytes
    kind: str


class Writer:
    """Writes lines and whole files in a thread of its own, in the order in which they were given.

    :meth:`append` and :meth:`replace` put a record into a queue and return at once. A record that does not fit into the
    queue is dropped and counted. A record that cannot be written waits with the later ones of its file, and is tried
    again after :data:`RETRY_S`.

    A JSON line is one ``write()`` of one complete line to a file opened with O_APPEND. A whole file is written by
    :func:`write_atomically`.

    Args:
        folder: The folder of the records, which messages name.
        restore: Called before a file of lines is opened, and again if it was removed or renamed.
        loss_record: Returns the file and the record that say how many records of each kind are missing. A kind is the
            name of a file of lines, or of a step file's folder. The record is appended when writing works again. If
            this is None, losses are printed only.
    """

    def __init__(
        self,
        folder: Path,
        restore: Callable[[], None] = lambda: None,
        loss_record: Callable[[Mapping[str, int]], tuple[Path, Mapping[str, Any]]] | None = None,
    ) -> None:
        self._folder, self._restore, self._loss_record = folder, restore, loss_record
        self._unreported: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()  # records that are queued, being written or waiting, by kind
        self._pending_bytes = 0
        self._queue: deque[_Record | Callable[[], object]] = deque()
        self._changed = threading.Condition()  # guards the attributes above; no file is touched while it is held
        self._closed = False
        self._progress = 0.0  # when the latest write ended, or the queue began to fill
        self._said: set[str] = set()
        # The thread alone uses these.
        self._waiting: list[_Record] = []
        self._failed: set[Path] = set()
        self._retry_at = 0.0
        self._error = ""
        self._descriptors: dict[Path, int] = {}
        self._torn: set[Path] = set()  # files that end in a part of a line
        threading.Thread(target=self._serve, name="snip-writer", daemon=True).start()

    # -- the training thread ---------------------------------------------------------------------------------------
    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Append one record to a file of JSON lines."""
        self._put(path, self._append, _line(record))

    def replace(self, path: Path, data: bytes, *, durable: bool = False) -> None:
        """Write a whole file."""
        self._put(path, partial(write_atomically, durable=durable), data)

    def _put(self, path: Path, write: Callable[[Path, bytes], None], data: bytes) -> None:
        kind = path.stem if path.parent == self._folder else path.parent.name
        with self._changed:
            records = self._pending.total()
            fits = not records or (records < MAX_RECORDS and self._pending_bytes + len(data) <= MAX_BYTES)
            stalls = records and time.monotonic() - self._progress > STALL_S
            if not records:
                self._progress = time.monotonic()
            if fits:
                self._pending[kind] += 1
                self._pending_bytes += len(data)
                self._queue.append(_Record(path, write, data, kind))
                self._changed.notify()
            else:
                self._unreported[kind] += 1
        if stalls and not self._error:
            self._say_once("stall", f"nothing could be written for {STALL_S:.0f} s; training goes on, the records wait")
        if not fits:
            self._say_once("loss", "the queue of records is full; training goes on, further records are lost")

    def call(self, function: Callable[[], object], timeout: float) -> bool:
        """Run a function in the thread, after all records so far were tried once more.

        Waits for at most ``timeout`` seconds. Returns whether the function has ended.
        """
        done = threading.Event()

        def run() -> None:
            try:
                function()
            finally:
                done.set()

        with self._changed:
            self._retry_at = 0.0
            self._queue.append(run)
            self._changed.notify()
        return done.wait(timeout)

    def flush(self, timeout: float = EXIT_S) -> bool:
        """Wait until all records so far were tried. Returns False after ``timeout`` seconds."""
        return self.call(lambda: None, timeout)

    def close(self, finish: Callable[[], object] = lambda: None) -> bool:
        """Try all records a last time, call ``finish`` in the thread, and end it. Prints which records are missing.

        Waits for the records for at most :data:`EXIT_S`, and for ``finish`` for at most :data:`FINISH_S`. Returns
        whether ``finish`` has ended.
        """
        answers = self.call(self._give_up, EXIT_S)
        with self._changed:
            if not answers:
                self._queue.clear()
                self._unreported += self._pending
            missing = self._unreported
        if missing:
            why = self._error if answers else f"the file system has not taken them within {EXIT_S:.0f} s"
            self._say(f"{_counts(missing)} are missing: {why}")
        finished = answers and self.call(finish, FINISH_S)
        with self._changed:
            self._closed = True
            self._changed.notify()
        return finished

    def _say_once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(message)

    def _say(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            print(f"snip: {self._folder}: {message}", file=sys.stderr, flush=True)

    # -- the writer thread -----------------------------------------------------------------------------------------
    def _serve(self) -> None:
        while (entry := self._next()) is not None:
            if isinstance(entry, _Record):
                self._write(entry)
            if not self._queue:
                self._report_losses()
            if not isinstance(entry, _Record):
                entry()
        for path in list(self._descriptors):
            self._release(path)

    def _next(self) -> _Record | Callable[[], object] | None:
        """Wait for the next entry. None if the writer is closed."""
        with self._changed:
            while True:
                if self._waiting and time.monotonic() >= self._retry_at:
                    self._queue.extendleft(reversed(self._waiting))
                    self._waiting.clear()
                    self._failed.clear()
                if self._queue:
                    return self._queue.popleft()
                if self._closed:
                    return None
                self._changed.wait(max(0.0, self._retry_at - time.monotonic()) if self._waiting else None)

    def _write(self, record: _Record) -> None:
        if record.path in self._failed:
            self._waiting.append(record)
            return
        try:
            record.write(record.path, record.data)
        except (OSError, MemoryError) as error:  # the thread lives on
            self._error = str(error)
            self._say_once("failure", f"cannot write ({error}); training goes on, the records are written later")
            if not self._waiting:
                self._retry_at = time.monotonic() + RETRY_S
            self._failed.add(record.path)
            self._waiting.append(record)
        else:
            with self._changed:
                self._pending[record.kind] -= 1
                self._pending_bytes -= len(record.data)
                self._progress = time.monotonic()

    def _give_up(self) -> None:
        """Count the records that wait as lost."""
        with self._changed:
            self._unreported += Counter(record.kind for record in self._waiting)
        self._waiting.clear()
        self._failed.clear()
        self._report_losses()

    def _report_losses(self) -> None:
        """Record and print how many records are missing, once their file of lines can be written again."""
        with self._changed:
            lost, self._unreported = self._unreported, Counter()
        if not lost:
            return
        try:
            if self._loss_record is not None:
                path, record = self._loss_record(lost)
                if path in self._failed:
                    raise OSError(self._error)
                self._append(path, _line(record))
            self._say(f"writes again; {_counts(lost)} are missing: {self._error or 'the queue was full'}")
        except OSError as error:
            self._error = str(error)
            with self._changed:
                self._unreported += lost

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
        self._restore()
        self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        return self._descriptors[path]

    def _release(self, path: Path) -> None:
        if path in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop(path))


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(jsonable(record), allow_nan=False) + "\n").encode()


def _counts(records: Mapping[str, int]) -> str:
    """Return how many records there are, in all and by kind, as text."""
    kinds = ", ".join(f"{number} of {kind}" for kind, number in records.items() if number)
    return f"{sum(records.values())} records ({kinds})"


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
