"""The writer of a run directory (docs/file-formats.md, Run directory), and the lock that keeps a second job out.

``step`` is the 0-based training step. Records that are made before or during ``train_step(N)`` have step N. A run that
resumes from a checkpoint of N completed steps continues with step N.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.runtime.run_data import (
    CONFIG,
    EVENTS,
    METRICS,
    REPORT,
    RUN_SCHEMA,
    SCORES_SCHEMA,
    STEP_FILES,
    TIMINGS,
    parse_line,
    read_config,
    step_files,
    step_path,
)
from snip_megatron.runtime.storage import Writer, dump_json, flatten, jsonable, write_atomically

SPEED_FACTS = (
    "device", "gemm_backend", "world_size", "tensor_parallel", "pipeline_parallel", "data_parallel",
    "sequence_parallel", "global_batch_size", "micro_batch_size",
)  # fmt: skip
"""Facts without which times of steps cannot be compared. A ``resume`` event names the first one that changed."""

LOCK = "lock.json"
LOCK_SCHEMA = "snip.lock/1"


class RunDirectory:
    """The writer of a run directory. Only rank 0 constructs one.

    Only the constructor touches files in the calling thread, and raises if that fails. All later records are written by
    the thread of a :class:`Writer`, so that a file system that fails or stalls costs the training nothing.

    Raises SnipError if the directory cannot be written, is written by another job, belongs to another configuration, or
    holds the events of an earlier run although this run does not resume.

    Args:
        config: The configuration of the run. On a restart it is compared with the one in the directory.
        facts: Values that may differ between restarts (layout, versions). The latest are stored.
        overwrite: Whether an earlier run's records may be removed. With ``resume_step``, whether a changed ``config``
            is accepted; the records before that step stay.
        resume_step: The next training step after a checkpoint was loaded. None for a fresh run. A job that may be a
            restarted one and has no checkpoint passes 0.
    """

    def __init__(
        self,
        path: Path | str,
        config: Mapping[str, Any],
        *,
        overwrite: bool,
        resume_step: int | None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.step_s: float | None = None  # seconds of the last completed training step, which every event records
        self._body: dict[str, Any] = {"schema": RUN_SCHEMA, "config": jsonable(config), "facts": facts or {}}
        self._config = dump_json(self._body).encode()
        try:
            take_lock(self.path)
            resuming = resume_step is not None
            changed = _compare_with_earlier_run(self.path, self._body, overwrite=overwrite, resuming=resuming)
            for folder in STEP_FILES:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            cut_records = _clear(self.path) if resume_step is None else _cut_back(self.path, resume_step)
            write_atomically(self.path / CONFIG, self._config)
        except (OSError, SnipError) as error:
            release_lock(self.path)
            if isinstance(error, SnipError):
                raise
            why = f"cannot be written ({error}); choose another --snip-dir"
            raise SnipError(f"run directory {self.path}: {why}") from None
        self._last_step = -1 if resume_step is None else resume_step
        self._closed = False
        self.writer = Writer(self.path, self._restore_config, self._loss_record)
        atexit.register(self.close)
        if resume_step is not None and (resume_step or cut_records):  # else there is neither checkpoint nor earlier run
            self.event(resume_step, "resume", cut_records=cut_records, **changed)
            self.writer.flush()  # the account of earlier steps is read before the first one

    @property
    def facts(self) -> Mapping[str, Any]:
        """Values that may differ between restarts."""
        facts: Mapping[str, Any] = self._body["facts"]
        return facts

    def set_fact(self, name: str, value: Any) -> None:
        """Replace one of the ``facts``, which became known later."""
        self._body["facts"] = {**self._body["facts"], name: value}
        self._config = dump_json(self._body).encode()
        self.writer.replace(self.path / CONFIG, self._config)

    def _restore_config(self) -> None:
        """Write ``config.json`` again if the directory is gone. Readers and a resume need it."""
        if not (self.path / CONFIG).exists():
            write_atomically(self.path / CONFIG, self._config)

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """Record an event of a training step.

        ``wait_s`` among the fields is the time in seconds for which the event blocked the training thread.
        """
        self._append(EVENTS, step, {"event": kind, "step_s": self.step_s, "wait_s": None} | fields | {"event": kind})

    def metric(
        self, step: int, /, loss: float | None, grad_norm: float | None, fp4_fraction: float | None, **fields: Any
    ) -> None:
        """Record the figures of a training step.

        ``fp4_fraction`` is the fp4 share of the FLOPs of the decoder's linears, in [0, 1].
        """
        self._append(METRICS, step, {"loss": loss, "grad_norm": grad_norm, "fp4_fraction": fp4_fraction, **fields})

    def _append(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        self._last_step = int(step)
        self.writer.append(self.path / name, self._stamped(fields))

    def _stamped(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        stamp = {"time": round(time.time(), 3), "step": self._last_step}
        return {**stamp, **fields, **stamp}

    def _loss_record(self, lost: Mapping[str, int]) -> tuple[Path, dict[str, Any]]:
        fields = {"event": "records_lost", "step_s": None, "wait_s": None, "kinds": dict(lost)}
        return self.path / EVENTS, self._stamped({**fields, "records": sum(lost.values())})

    def write(self, folder: str, step: int, content: str | bytes) -> None:
        """Write the file of a step in ``folder``, a key of STEP_FILES."""
        data = content.encode() if isinstance(content, str) else content
        self.writer.replace(step_path(self.path, folder, step), data)

    def write_scores(self, step: int, scores: Mapping[str, Any], *, version: int) -> None:
        """Write ``scores/step_<step>.json``: ``scores[option][format]`` holds delta_loss, delta_weight and q.

        ``version`` is that of the map that was solved from them.
        """
        self.write(
            "scores", step, dump_json({"schema": SCORES_SCHEMA, "step": step, "version": version, "scores": scores})
        )

    def close(self, finish: Callable[[Path], object] | None = None) -> None:
        """Write the records that wait, remove the lock, and call ``finish`` with the path of the directory.

        All of this happens in the writer's thread, for which this method waits a bounded time; see
        :meth:`Writer.close`. If the file system stalls, the lock stays, and is stale when this process has ended.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)

        def end() -> None:
            release_lock(self.path)
            if finish is not None:
                finish(self.path)

        if not self.writer.close(end) and finish is not None:
            print(f"snip: no report: its files cannot be reached in time; later: snip report {self.path}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# -- restart -------------------------------------------------------------------------------------------------------
def _cut_back(run: Path, step: int) -> int:
    """Set aside what was recorded from ``step`` on. Returns the number of lines. Raises OSError.

    Lines are appended to ``<file>.1``, and later step files get the suffix ``.1``.
    """
    for folder in STEP_FILES:
        for file_step, file in step_files(run, folder).items():
            if file_step >= step:
                file.replace(file.with_name(file.name + ".1"))
    return sum(_cut_back_lines(run / name, step) for name in (EVENTS, METRICS))


def _cut_back_lines(path: Path, step: int) -> int:
    """Move the records from ``step`` on to ``<path>.1``. Returns their number. Raises OSError.

    The event ``validation`` of ``step`` itself stays, because Megatron validates before it saves and not again after a
    load. The tail is saved before the file is replaced, so that a crash in between loses nothing.
    """
    if not path.exists():
        return 0
    head: list[bytes] = []
    tail: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        record = parse_line(line) if line.endswith(b"\n") else None
        last = step if record is not None and record.get("event") == "validation" else step - 1
        (head if record is not None and record["step"] <= last else tail).append(line)
    if tail:
        if not tail[-1].endswith(b"\n"):
            tail[-1] += b"\n"
        with path.with_name(path.name + ".1").open("ab") as file:
            file.writelines(tail)
        write_atomically(path, b"".join(head))
    return len(tail)


def _clear(run: Path) -> int:
    """Remove an earlier run's files. Other files stay. Raises OSError."""
    for folder in STEP_FILES:
        for file in [*step_files(run, folder).values(), *step_files(run, folder, ".1").values()]:
            file.unlink()
    for name in (EVENTS, METRICS, REPORT, TIMINGS):
        for file in (run / name, run / f"{name}.1"):
            file.unlink(missing_ok=True)
    return 0


def _compare_with_earlier_run(run: Path, body: Mapping[str, Any], *, overwrite: bool, resuming: bool) -> dict[str, Any]:
    """Compare the ``config.json`` of the directory with ``body``, the new one.

    Returns ``changed_key`` and ``changed_fact``: the first key of the configuration and the first of
    :data:`SPEED_FACTS` that differ. None if there is no difference, or no earlier run. Raises SnipError where records
    of two runs would be mixed.
    """
    has_events = (run / EVENTS).exists() and (run / EVENTS).stat().st_size > 0
    changed: dict[str, str | None] = {"changed_key": None, "changed_fact": None}
    earlier, fault, remedy = None, "", "pass --snip-overwrite or another --snip-dir"
    try:
        earlier = read_config(run) if (run / CONFIG).exists() else None
    except SnipError as error:
        fault = str(error).removeprefix(f"run directory {run}: ")
    if earlier is not None:
        difference = _first_difference(earlier["config"], body["config"])
        if difference is not None:
            changed["changed_key"], old, new = difference[0], *map(cut, difference[1:])
            fault = f"belongs to another configuration: {cut(difference[0])} is {old} there and {new} here"
        elif has_events and not resuming:
            fault = "holds the events of an earlier run"
            remedy = f"resume from its checkpoint (--load), {remedy}"
        before, now = earlier["facts"], body["facts"]
        both = [name for name in SPEED_FACTS if name in before and name in now]
        changed["changed_fact"] = next((name for name in both if before[name] != jsonable(now[name])), None)
    elif has_events and not fault:
        fault = f"holds events but no {CONFIG}"
    if fault and not overwrite:
        raise SnipError(f"run directory {run}: {fault}; {remedy}")
    return changed


def _first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return (dotted key, old value, new value) of the first difference in the order of ``new``'s keys, or None."""
    before, after = flatten(old), flatten(new)
    for key in dict.fromkeys([*after, *before]):
        pair = [json.dumps(side[key]) if key in side else "absent" for side in (before, after)]
        same = key in before and key in after and before[key] == after[key]
        if not same or ("true" in pair and pair[0] != pair[1]):  # 1 equals 1.0, but not True
            return key, pair[0], pair[1]
    return None


# -- lock ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Lock:
    """The content of ``lock.json``: the process that writes a run directory.

    The lock of a job that was killed stays in the directory.
    """

    host: str
    process: int
    born: int  # start of the process in clock ticks, because process ids are used again
    job: str | None  # id of the SLURM job or of torchrun's rendezvous. None if there is none

    @classmethod
    def of_this_process(cls) -> Lock:
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
        born = _start_ticks(os.getpid()) or 0
        return cls(socket.gethostname(), os.getpid(), born, None if job in ("", "none") else job)

    @classmethod
    def parse(cls, content: bytes) -> Lock | None:
        """Return the lock with this content. None if it is torn."""
        try:
            body = json.loads(content)
            return cls(str(body["host"]), int(body["process"]), int(body["born"]), body["job"] and str(body["job"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            return None

    @property
    def has_ended(self) -> bool:
        """Whether the process was one of this host and has ended."""
        return self.host == socket.gethostname() and _start_ticks(self.process) != self.born

    @property
    def is_mine(self) -> bool:
        """Whether this process wrote the lock."""
        return self == replace(Lock.of_this_process(), job=self.job)

    @property
    def is_stale(self) -> bool:
        """Whether this process may take over the lock.

        On its own host a lock is stale if its process has ended. A lock of another host is stale if it belongs to an
        earlier start of the same job, which SLURM or torchrun has ended before it started this one.
        """
        this = Lock.of_this_process()
        if self.host == this.host:
            return self.has_ended or self.is_mine
        return self.job is not None and self.job == this.job

    def __str__(self) -> str:
        job = "" if self.job is None else f" of job {cut(self.job)}"
        return f"process {self.process}{job} on {cut(self.host)}"


def read_lock(run: Path) -> Lock | None:
    """Return the lock of a run directory. None if there is none, or it cannot be read."""
    try:
        return Lock.parse((run / LOCK).read_bytes())
    except OSError:
        return None


def take_lock(run: Path) -> None:
    """Lock the run directory for this process, until it calls :func:`release_lock` or has ended.

    Of several processes that call this at the same time, one gets the lock. Raises SnipError if another job has it, and
    OSError if it cannot be written.
    """
    run.mkdir(parents=True, exist_ok=True)
    body = {"schema": LOCK_SCHEMA, **asdict(Lock.of_this_process()), "time": round(time.time(), 3)}
    part = run / f".{uuid.uuid4().hex}.part"
    try:
        part.write_text(dump_json(body), encoding="utf-8")
        _take(run / LOCK, part)
    finally:
        part.unlink(missing_ok=True)


def _take(path: Path, part: Path) -> None:
    """Give the lock ``part`` the name ``path``, which no other process has then. Raises SnipError or OSError.

    A link appears with its whole content, and fails if the name is taken. A stale lock is replaced only by the process
    that has a second lock, whose name depends on the content of the stale one. If that process is killed before it has
    replaced the lock, the second lock is stale as well.
    """
    while True:
        try:
            os.link(part, path)
            return
        except FileExistsError:
            content = _content(path)
        if content is None:
            continue
        other = Lock.parse(content)
        if other is not None and not other.is_stale:
            is_local = other.host == socket.gethostname()
            runs, remedy = (", which still runs", "") if is_local else ("", f"; if it is dead, remove {path}")
            raise SnipError(
                f"run directory {path.parent}: belongs to {other}{runs}; end it or choose another --snip-dir{remedy}"
            )
        second = path.with_name(f"{path.name}.{hashlib.sha256(content).hexdigest()[:16]}")
        _take(second, part)
        if _content(path) == content:
            os.replace(second, path)
            return
        second.unlink()


def _content(path: Path) -> bytes | None:
    """Return the content of a file. None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def release_lock(run: Path) -> None:
    """Remove the lock if this process wrote it."""
    lock = read_lock(run)
    if lock is not None and lock.is_mine:
        with contextlib.suppress(OSError):
            (run / LOCK).unlink()


def _start_ticks(process: int) -> int | None:
    """Return the start of a process in clock ticks since the host's. None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except (OSError, ValueError):
        return None
