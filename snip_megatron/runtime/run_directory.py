"""The run directory, which rank 0 writes (docs/file-formats.md, Run directory).

``step`` is the 0-based training step. Records that are made before or during ``train_step(N)`` have step N. A run that
resumes from a checkpoint of N completed steps continues with step N, so ``resume_step=N`` keeps the records with step <
N.

Only the constructor raises on an I/O error. Later, a failed write is reported once, kept, and tried again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
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
    read_config,
    step_files,
    step_path,
)
from snip_megatron.runtime.storage import Writer, cut_back, dump_json, flatten, jsonable, write_atomically

SPEED_FACTS = (
    "device", "gemm_backend", "world_size", "tensor_parallel", "pipeline_parallel", "data_parallel",
    "sequence_parallel", "global_batch_size", "micro_batch_size",
)  # fmt: skip
"""Facts without which times of steps cannot be compared. A ``resume`` event names the first one that changed."""


class RunDirectory:
    """The writer of a run directory. Only rank 0 constructs one.

    Args:
        config: the configuration of the run, compared on a restart with the one in the directory.
        facts: values that may differ between restarts (layout, versions). The latest are kept.
        overwrite: allows to remove an earlier run's records. With ``resume_step`` it instead accepts a changed
            ``config`` and keeps the records before that step.
        resume_step: the next training step after a checkpoint was loaded; None for a fresh run. A job that may be a
            restarted one, and found no checkpoint, passes 0.

    Raises SnipError if the directory cannot be written, is written by another job, belongs to another configuration, or
    holds the events of an earlier run although this run does not resume.
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
        self.step_s: float | None = None
        """Duration of the last completed training step in seconds. Every event records it."""
        wanted = jsonable(config)
        body: dict[str, Any] = {"schema": RUN_SCHEMA, "config": wanted, "facts": facts or {}}
        try:
            check_lock(self.path)
            changed = _check_earlier_run(self.path, wanted, overwrite=overwrite, resuming=resume_step is not None)
            take_lock(self.path)
            for folder in STEP_FILES:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            changed_fact = None if resume_step is None else _changed_fact(self.path, facts or {})
            gone = _clear(self.path) if resume_step is None else _cut_back(self.path, resume_step)
            self._body, self._config = body, dump_json(body).encode()
            write_atomically(self.path / CONFIG, self._config)
        except OSError as error:
            raise SnipError(
                f"run directory {self.path}: cannot be written ({error}); choose another --snip-dir"
            ) from None
        self.writer = Writer(self.path, self._keep_config)
        if resume_step is not None and (resume_step or gone):  # else there was neither a checkpoint nor an earlier run
            self.event(resume_step, "resume", cut_records=gone, changed_key=changed, changed_fact=changed_fact)

    def set_fact(self, name: str, value: Any) -> None:
        """Replace one of the ``facts``, which became known later."""
        self._body["facts"] = {**self._body["facts"], name: value}
        self._config = dump_json(self._body).encode()
        self.writer.replace(self.path / CONFIG, self._config, durable=True)

    def _keep_config(self) -> None:
        """Write ``config.json`` again if the directory is gone: no reader and no resume accepts one without it."""
        if not (self.path / CONFIG).exists():
            write_atomically(self.path / CONFIG, self._config)

    # -- lines -------------------------------------------------------------------------------------------------
    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """Record an event ``kind`` of a training step, with its own fields: ``wait_s`` among them is the seconds for
        which it blocked the training thread, ``step_s`` the duration of the last step, by default the attribute.
        """
        self._append(EVENTS, step, {"event": kind, "step_s": self.step_s, "wait_s": None} | fields | {"event": kind})

    def metric(
        self, step: int, /, loss: float | None, grad_norm: float | None, fp4_fraction: float | None, **fields: Any
    ) -> None:
        """Record the figures of training step ``step``.

        ``fp4_fraction`` is the fp4 share of the FLOPs of the decoder's linears, in [0, 1].
        """
        self._append(METRICS, step, {"loss": loss, "grad_norm": grad_norm, "fp4_fraction": fp4_fraction, **fields})

    def _append(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        stamp = {"time": round(time.time(), 3), "step": int(step)}
        self.writer.append(self.path / name, {**stamp, **fields, **stamp})

    # -- whole files -------------------------------------------------------------------------------------------
    def write(self, folder: str, step: int, content: str | bytes) -> None:
        """Write ``<folder>/step_<step>``, the statistics, the Problem, the map or the plan of a step."""
        data = content.encode() if isinstance(content, str) else content
        self.writer.replace(step_path(self.path, folder, step), data)

    def write_scores(self, step: int, scores: Mapping[str, Any], *, version: int) -> None:
        """Write ``scores/step_<step>.json``: ``scores[option][format]`` holds delta_loss, delta_weight and q.

        ``version`` is that of the map that was solved from them.
        """
        body = {"schema": SCORES_SCHEMA, "step": step, "version": version, "scores": scores}
        self.write("scores", step, dump_json(body))

    def close(self) -> None:
        """Try all kept writes a last time, report how many were lost, and close the files."""
        self.writer.close()
        release_lock(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# -- restart -------------------------------------------------------------------------------------------------------
def _cut_back(path: Path, step: int) -> int:
    """Keep what was recorded before ``step``. Later step files get the suffix ``.1``. Raises OSError."""
    for folder in STEP_FILES:
        for file_step, file in step_files(path, folder).items():
            if file_step >= step:
                file.replace(file.with_name(file.name + ".1"))
    return cut_back(path / EVENTS, step) + cut_back(path / METRICS, step)


def _clear(path: Path) -> int:
    """Remove an earlier run's files. Other files stay. Raises OSError."""
    for folder in STEP_FILES:
        for file in [*step_files(path, folder).values(), *step_files(path, folder, ".1").values()]:
            file.unlink()
    for name in (EVENTS, METRICS, REPORT, TIMINGS):
        for file in (path / name, path / f"{name}.1"):
            file.unlink(missing_ok=True)
    return 0


def _check_earlier_run(path: Path, wanted: Mapping[str, Any], *, overwrite: bool, resuming: bool) -> str | None:
    """Compare the directory's configuration with ``wanted``.

    Returns the first key that differs, or None if the configurations are equal or there is no earlier one. Raises
    SnipError where records of two runs would be mixed.
    """
    if path.exists() and not path.is_dir():
        raise SnipError(f"run directory {path}: is a file; choose another --snip-dir")
    events = (path / EVENTS).exists() and (path / EVENTS).stat().st_size > 0
    difference: tuple[str, str, str] | None = None
    fault, remedy = "", "pass --snip-overwrite or another --snip-dir"
    if (path / CONFIG).exists():
        try:
            difference = _first_difference(read_config(path)["config"], wanted)
        except SnipError as error:
            fault = str(error).removeprefix(f"run directory {path}: ")
        if difference is not None:
            key, old, new = map(cut, difference)
            fault = f"belongs to another configuration: {key} is {old} there and {new} here"
        elif events and not resuming and not fault:
            fault = "holds the events of an earlier run"
            remedy = f"resume from its checkpoint (--load), {remedy}"
    elif events:
        fault = f"holds events but no {CONFIG}"
    if fault and not overwrite:
        raise SnipError(f"run directory {path}: {fault}; {remedy}")
    return difference[0] if difference else None


def _changed_fact(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Return the name of the first fact that changes the time of a step and differs from the directory's; else None."""
    try:
        earlier = read_config(path)["facts"]
    except SnipError:  # there is none, or it was broken and is overwritten
        return None
    names = [name for name in SPEED_FACTS if name in earlier and name in facts]
    return next((name for name in names if earlier[name] != jsonable(facts[name])), None)


def _first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return (dotted key, old value, new value) of the first difference in the order of ``new``'s keys, or None."""
    before, after = flatten(old), flatten(new)
    for key in dict.fromkeys([*after, *before]):
        pair = [json.dumps(side[key]) if key in side else "absent" for side in (before, after)]
        same = key in before and key in after and before[key] == after[key]
        if not same or ("true" in pair and pair[0] != pair[1]):  # 1 equals 1.0, but not True
            return key, pair[0], pair[1]
    return None


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
