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
"""Limits of the records that wait to be written, half of them for files that failed. Those that do not fit are dropped
and counted."""
_RETRIES = 4  # failures of files that have failed before, until the next record
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


class _Queue(deque[_Record]):
    """Records in order, whose bytes are counted."""

    bytes = 0

    def put(self, record: _Record) -> None:
        self.append(record)
        self.bytes += len(record.data)

    def take(self) -> _Record:
        record = self.popleft()
        self.bytes -= len(record.data)
        return record


class Writer:
    """Writes lines and whole files in a thread of its own, in the order in which they were given.

    :meth:`append` and :meth:`replace` put a record into a queue and return at once. A record that does not fit into the
    queue is dropped and counted. A record that cannot be written waits with the later ones of its file, and is tried
    again with the next record. Those of other files are written meanwhile.

    A JSON line is one ``write()`` of one complete line to a file opened with O_APPEND. A whole file is written by
    :func:`write_atomically`.

    Args:
        folder: The folder of the records, which messages name.
        restore: Called before a file of lines is created.
        loss_record: Returns the file and the record that say how many records of each kind are missing. A kind is the
            name of a file of lines, or of a step file's folder. The record is appended when writing works again.
    """

    def __init__(
        self,
        folder: Path,
        restore: Callable[[], None],
        loss_record: Callable[[Mapping[str, int]], tuple[Path, Mapping[str, Any]]],
    ) -> None:
        self._folder, self._restore, self._loss_record = folder, restore, loss_record
        self._changed = threading.Condition()  # guards the queues and counts; no file is touched inside it
        self._queue = _Queue()  # the first one is being written
        self._failed: dict[Path, _Queue] = {}  # of files that could not be written
        self._calls: deque[Callable[[], object]] = deque()
        self._lost: Counter[str] = Counter()  # of which no record tells yet
        self._closed = self._has_news = False
        self._progress = 0.0  # when the latest write ended, or the queue began to fill
        self._error = ""
        self._printed: set[str] = set()
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
            waiting, record = len(self._queue), _Record(path, write, data, kind)
            fits = not waiting or self._fits(record, self._queue, *self._failed.values())
            stalls = waiting and time.monotonic() - self._progress > STALL_S
            if not waiting:
                self._progress = time.monotonic()
            if fits:
                self._queue.put(record)
            else:
                self._lost[kind] += 1
            self._wake()
        if stalls and not self._error:
            self._say_once("stall", f"nothing could be written for {STALL_S:.0f} s; training goes on, the records wait")
        if not fits:
            self._say_once("loss", "the queue of records is full; training goes on, further records are lost")

    @staticmethod
    def _fits(record: _Record, *queues: _Queue, share: float = 1.0) -> bool:
        """Return whether queues may take a record more, for which they have a share of the limits."""
        size = len(record.data) + sum(queue.bytes for queue in queues)
        return sum(map(len, queues)) < share * MAX_RECORDS and size <= share * MAX_BYTES

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
            for queue in (self._queue, *self._failed.values()):
                self._lost += Counter(record.kind for record in queue)
                queue.clear()
            self._failed.clear()
        if answers:
            self.call(self._record_losses, EXIT_S)
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
            self._write_failed(math.inf if calls else _RETRIES)
            self._write_queue()
            for _ in range(calls):
                self._calls.popleft()()

    def _write_failed(self, retries: float) -> None:
        """Try the files that failed before, until ``retries`` of them fail again. Next time, these are tried last."""
        for path, records in list(self._failed.items()):
            while records and self._is_written(records[0]):
                self._remove_first(records)
            with self._changed:
                self._failed.pop(path, None)
                if records:
                    self._failed[path] = records
                    retries -= 1
            if retries <= 0:
                return

    def _write_queue(self) -> None:
        """Write the queue. Records of a file that fails are set aside."""
        while self._queue:
            record = self._queue[0]
            if record.path in self._failed or not self._is_written(record):
                self._set_aside(record)
            else:
                self._remove_first(self._queue)
        if not self._failed:
            self._record_losses()

    def _is_written(self, record: _Record) -> bool:
        try:
            record.write(record.path, record.data)
        except (OSError, MemoryError) as error:  # the thread lives on
            self._error = str(error)
            self._say_once("failure", f"cannot write ({error}); training goes on, the records are written later")
            return False
        return True

    def _remove_first(self, queue: _Queue) -> None:
        with self._changed:
            if queue:  # close may have given up
                queue.take()
            self._progress = time.monotonic()

    def _set_aside(self, record: _Record) -> None:
        """Move the first record of the queue to those of its file that failed before."""
        with self._changed:
            if not self._queue:  # close has given up
                return
            self._queue.take()
            fits = self._fits(record, *self._failed.values(), share=0.5)
            if fits:
                self._failed.setdefault(record.path, _Queue()).put(record)
            else:
                self._lost[record.kind] += 1
            self._progress = time.monotonic()
        if not fits:
            self._say_once("loss", "too many records cannot be written; training goes on, further records are lost")

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
