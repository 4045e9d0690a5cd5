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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from snip_megatron.precision.errors import SnipError

MAX_BYTES, MAX_RECORDS = 16 * 2**20, 16_384
"""Limits of the records of one kind that wait to be written. Those that do not fit are dropped and counted. A file that
can never be written leaves the other kinds their room."""
STALL_S = 30.0
"""Seconds without a write until a line says so."""
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


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file in the same folder, sync it, and rename it to ``path``.

    A reader sees the whole old file or the whole new one, also after a loss of power. It is the new one if this
    function has returned. Several processes may write the same file. Raises OSError if it cannot be written.
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
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder, and the file is complete
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(eq=False, slots=True)
class _Record:
    path: Path
    write: Callable[[Path, bytes], None]
    data: bytes
    kind: str  # name of a file of lines, or of a step file's folder


class Writer:
    """Writes lines and whole files in a thread of its own, in the order of the calls.

    :meth:`append` and :meth:`replace` put a record into a queue and return at once. A record that does not fit into the
    queue is dropped and counted. If a record cannot be written, it and the later ones of its file wait, and are tried
    again with the next record. Those of other files are written meanwhile.

    A JSON line is one ``write()`` of one complete line to a file opened with O_APPEND. A whole file is written by
    :func:`write_atomically`.

    Args:
        folder: The folder of the records, which messages name.
        restore: Called before a file of lines is created.
        loss_record: Returns the file and the record that say how many records of each kind are missing. The record is
            appended when writing works again.
    """

    def __init__(
        self,
        folder: Path,
        restore: Callable[[], None],
        loss_record: Callable[[Mapping[str, int]], tuple[Path, Mapping[str, Any]]],
    ) -> None:
        self._folder, self._restore, self._loss_record = folder, restore, loss_record
        self._changed = threading.Condition()  # guards the queue and the counts; no file is touched inside it
        self._queue: dict[_Record, None] = {}  # records that are not written yet, in order
        self._waiting: Counter[str] = Counter()  # records in the queue by kind
        self._bytes: Counter[str] = Counter()  # their bytes by kind
        self._calls: deque[Callable[[], object]] = deque()
        self._lost: Counter[str] = Counter()  # of which no record tells yet
        self._closed = self._has_news = False
        self._progress = 0.0  # when the latest record was tried, or the queue began to fill
        self._error = ""
        self._printed: set[str] = set()
        self._torn: set[Path] = set()  # files that end in a part of a line
        threading.Thread(target=self._serve, name="snip-writer", daemon=True).start()

    # -- the training thread ---------------------------------------------------------------------------------------
    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Append one record to a file of JSON lines."""
        self._put(path, self._append, _line(record))

    def replace(self, path: Path, data: bytes) -> None:
        """Write a whole file."""
        self._put(path, write_atomically, data)

    def _put(self, path: Path, write: Callable[[Path, bytes], None], data: bytes) -> None:
        record = _Record(path, write, data, path.stem if path.parent == self._folder else path.parent.name)
        kind = record.kind
        with self._changed:
            if not self._queue:
                self._progress = time.monotonic()
            stalls = time.monotonic() - self._progress > STALL_S
            limits_hold = self._waiting[kind] < MAX_RECORDS and self._bytes[kind] + len(data) <= MAX_BYTES
            fits = limits_hold or not self._waiting[kind]
            if fits:
                self._queue[record] = None
                self._waiting[kind] += 1
                self._bytes[kind] += len(data)
            else:
                self._lost[kind] += 1
            self._wake()
        if stalls:
            self._say_once("stall", f"nothing could be written for {STALL_S:.0f} s; training goes on, the records wait")
        if not fits:
            self._say_once("loss", "the queue of records is full; training goes on, further records are lost")

    def _wake(self) -> None:
        self._has_news = True
        self._changed.notify()

    def call(self, function: Callable[[], object], timeout: float) -> bool:
        """Run a function in the thread, after all records so far were tried once more.

        Waits for at most ``timeout`` seconds. Returns whether the function has ended.
        """
        completed = threading.Event()

        def run() -> None:
            try:
                function()
            finally:
                completed.set()

        with self._changed:
            self._calls.append(run)
            self._wake()
        return completed.wait(timeout)

    def flush(self) -> bool:
        """Wait until all records so far were tried. Returns False after :data:`EXIT_S` seconds."""
        return self.call(lambda: None, EXIT_S)

    def close(self, finish: Callable[[], object] = lambda: None) -> bool:
        """Try all records a last time, call ``finish`` in the thread, and end it. Prints which records are missing.

        Waits for the records for at most :data:`EXIT_S`, and for ``finish`` for at most :data:`FINISH_S`. Returns
        whether ``finish`` has ended.
        """
        answers = self.flush()
        why = self._error if answers else f"the file system has not taken them within {EXIT_S:.0f} s"
        with self._changed:
            self._lost += self._waiting
            self._queue.clear()
        if answers:
            self.flush()  # records the losses
        if self._lost:
            self._say(f"{_counts(self._lost)} are missing: {why}")
        finished = answers and self.call(finish, FINISH_S)
        with self._changed:
            self._closed = True
            self._wake()
        return finished

    def _say_once(self, kind: str, message: str) -> None:
        if kind not in self._printed:
            self._printed.add(kind)
            self._say(message)

    def _say(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            print(f"snip: {self._folder}: {message}", file=sys.stderr, flush=True)

    # -- the writer thread -----------------------------------------------------------------------------------------
    def _serve(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news)
                self._has_news, calls = False, len(self._calls)
                records = list(self._queue)
            self._write(records)
            for _ in range(calls):
                self._calls.popleft()()

    def _write(self, records: Sequence[_Record]) -> None:
        """Try ``records``. After one that fails, the later ones of its file stay in the queue untried."""
        failed: set[Path] = set()
        for record in records:
            if record.path in failed or record not in self._queue:  # the latter: close has given up
                continue
            try:
                record.write(record.path, record.data)
            except (OSError, MemoryError) as error:  # the thread lives on
                failed.add(record.path)
                self._error = str(error)
                self._say_once("failure", f"cannot write ({error}); training goes on, the records are written later")
            with self._changed:
                self._progress = time.monotonic()
                if record.path not in failed and record in self._queue:
                    del self._queue[record]
                    self._waiting[record.kind] -= 1
                    self._bytes[record.kind] -= len(record.data)
        if not failed:
            self._record_losses()

    def _record_losses(self) -> None:
        """Record and print how many records are missing, if their file of lines can be written."""
        with self._changed:
            lost, self._lost = self._lost, Counter()
        if not lost:
            return
        try:
            path, record = self._loss_record(lost)
            self._append(path, _line(record))
            self._say(f"writes again; {_counts(lost)} are missing: {self._error or 'the queue was full'}")
        except OSError as error:
            self._error = str(error)
            with self._changed:
                self._lost += lost

    def _append(self, path: Path, line: bytes) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._torn.discard(path)
            self._restore()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            data = b"\n" + line if path in self._torn else line
            written = os.write(descriptor, data)
            if 0 < written < len(data):  # a full disk may take a part of the line
                self._torn.add(path)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self._torn.discard(path)
        finally:
            os.close(descriptor)


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
