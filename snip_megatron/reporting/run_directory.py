"""The run directory: what rank 0 writes down about a run, and the readers of it (DESIGN, "Run directory").

    config.json             {"schema": "snip.run/1", "config": {...}, "facts": {...}}
    events.jsonl            one object a line: time (Unix seconds), step, event, step_s, wait_s and the event's fields
    metrics.jsonl           one object a line: time, step, loss, grad_norm, fp4_fraction, ...
    stats/step_<N>.npz      StatisticsTable.save
    problems/step_<N>.json  snip.problem/1
    maps/step_<N>.json      snip.map/1
    scores/step_<N>.json    snip.scores/1, why: version, scores[option][format] = {delta_loss, delta_weight, q}
    report.html             `snip report`

``step`` is the 0-based training step: what is recorded before or in ``train_step(N)`` has step N. After a resume from a
checkpoint of N completed steps the next step is N, so ``resume_step=N`` keeps the records with step < N.

    run = RunDirectory(path, config, overwrite=False, resume_step=None, facts={...})   # rank 0; may raise SnipError
    run.step_s = 0.41                                       # once a step: how long the last one took
    run.event(8, "probe", kind="statistics", seconds=0.2, tokens=512, wait_s=0.2)
    run.metric(8, loss=3.2, grad_norm=1.1, fp4_fraction=0.75)
    run.write_map(12, precision_map)
    run.close()

After the constructor nothing raises on an I/O error: a failed write is kept, warned about once, and tried again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap
from snip_megatron.reporting.readers import (
    CONFIG,
    EVENTS,
    METRICS,
    REPORT,
    RUN_SCHEMA,
    SCORES_SCHEMA,
    STEP_FILES,
    read_config,
    read_events,
    read_maps,
    read_metrics,
    read_scores,
    step_of,
)
from snip_megatron.reporting.storage import (
    Faults,
    LineFile,
    WriteQueue,
    cut_back,
    dump_json,
    jsonable,
    write_atomically,
)
from snip_megatron.statistics.table import StatisticsTable

__all__ = ["RunDirectory", "read_config", "read_events", "read_maps", "read_metrics", "read_scores"]


class RunDirectory:
    """Rank 0's record of a run. ``path`` is created; other ranks do not construct one.

    Args:
        config: what makes two runs the same run; compared with the directory's on a restart.
        facts: what may differ between restarts (layout, versions, command line); the latest is kept.
        overwrite: an earlier run's records may be removed; with ``resume_step`` a changed ``config`` is accepted and
            the records before that step stay.
        resume_step: the next training step after a checkpoint was loaded; None for a run that starts fresh. A
            restarted job that found no checkpoint yet passes 0.

    Raises SnipError if the directory cannot be written, is of another configuration, or holds an earlier run's events
    and the run does not resume.
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
        """Duration of the last completed training step in seconds; goes into every event."""
        self.faults = Faults(self.path)
        wanted = jsonable(config)
        body = {"schema": RUN_SCHEMA, "config": wanted, "facts": facts or {}}
        try:
            changed = _check_earlier_run(self.path, wanted, overwrite=overwrite, resuming=resume_step is not None)
            for folder in STEP_FILES:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            cut = _clear(self.path) if resume_step is None else _cut_back(self.path, resume_step)
            write_atomically(self.path / CONFIG, dump_json(body).encode())
        except OSError as error:
            raise SnipError(
                f"run directory {self.path}: cannot be written ({error}); choose another --snip-dir"
            ) from None
        self._events = LineFile(self.path / EVENTS, self.faults)
        self._metrics = LineFile(self.path / METRICS, self.faults)
        self._files = WriteQueue(self.faults, ordered=False)
        if resume_step is not None:
            self.event(resume_step, "resume", cut_records=cut, changed_key=changed)

    # -- lines -------------------------------------------------------------------------------------------------
    def event(
        self, step: int, kind: str, /, *, step_s: float | None = None, wait_s: float | None = None, **fields: Any
    ) -> None:
        """Record an event of ``step``. ``wait_s``: seconds that the training thread was blocked for it.

        ``step_s`` defaults to the attribute of that name. Fields named time, step or event are replaced by ours.
        """
        record = {
            "time": round(time.time(), 3),
            "step": int(step),
            "event": kind,
            "step_s": self.step_s if step_s is None else step_s,
            "wait_s": wait_s,
        }
        self._events.append(record | {name: value for name, value in fields.items() if name not in record})

    def metric(
        self, step: int, /, loss: float | None, grad_norm: float | None, fp4_fraction: float | None, **fields: Any
    ) -> None:
        """Record the figures of training step ``step``; ``fp4_fraction`` in [0, 1] of the decoder linears' FLOPs."""
        record = {
            "time": round(time.time(), 3),
            "step": int(step),
            "loss": loss,
            "grad_norm": grad_norm,
            "fp4_fraction": fp4_fraction,
        }
        self._metrics.append(record | {name: value for name, value in fields.items() if name not in record})

    # -- whole files -------------------------------------------------------------------------------------------
    def write_statistics(self, step: int, table: StatisticsTable) -> None:
        """Write ``stats/step_<step>.npz``."""
        path = self.step_path("stats", step)
        size = sum(array.nbytes for array in table.arrays().values())

        def save() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            table.save(path)

        self._files.put(save, size)

    def write_problem(self, step: int, problem: str | Mapping[str, Any]) -> None:
        """Write ``problems/step_<step>.json``: the text of a snip.problem/1 file, or its object."""
        self._write("problems", step, problem if isinstance(problem, str) else dump_json(problem))

    def write_map(self, step: int, precision_map: PrecisionMap) -> None:
        """Write ``maps/step_<step>.json``."""
        self._write("maps", step, precision_map.to_json())

    def write_scores(
        self, step: int, scores: Mapping[str, Mapping[str, Mapping[str, float]]], *, version: int | None = None
    ) -> None:
        """Write ``scores/step_<step>.json``: ``scores[option][format]`` holds delta_loss, delta_weight and q.

        ``version`` is that of the map solved from them; without it readers take the scores of the same step, else the
        latest before the map.
        """
        body = {"schema": SCORES_SCHEMA, "step": step, "version": version, "scores": scores}
        self._write("scores", step, dump_json(body))

    def step_path(self, folder: str, step: int) -> Path:
        """Path of a step file; ``folder`` is a key of STEP_FILES."""
        return self.path / folder / f"step_{int(step)}{STEP_FILES[folder]}"

    def _write(self, folder: str, step: int, text: str) -> None:
        data = text.encode()
        path = self.step_path(folder, step)
        self._files.put(lambda: write_atomically(path, data), len(data))

    # -- end ---------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Try kept writes now. Never raises on an I/O error."""
        self._events.flush()
        self._metrics.flush()
        self._files.drain(force=True)

    def close(self) -> None:
        """Write what is left, say what was lost, release the files."""
        self._events.close()
        self._metrics.close()
        self._files.drain(force=True)
        self._files.abandon()
        self.faults.report_loss()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- restart -------------------------------------------------------------------------------------------------------
def _check_earlier_run(path: Path, wanted: Mapping[str, Any], *, overwrite: bool, resuming: bool) -> str | None:
    """Refuse what must not be mixed; the first key that differs from the directory's configuration, or None."""
    if path.exists() and not path.is_dir():
        raise SnipError(f"run directory {path}: is a file; choose another --snip-dir")
    if not (path / CONFIG).exists():
        if _has_events(path) and not overwrite:
            raise SnipError(
                f"run directory {path}: holds events but no {CONFIG}; pass --snip-overwrite or another --snip-dir"
            )
        return None
    try:
        earlier = read_config(path)["config"]
    except SnipError as error:
        if not overwrite:
            raise SnipError(f"{error}; pass --snip-overwrite or another --snip-dir") from None
        return None
    difference = _first_difference(earlier, wanted)
    if difference is not None and not overwrite:
        key, old, new = difference
        raise SnipError(
            f"run directory {path}: belongs to another configuration: {key} is {old} there and {new} here; "
            "pass --snip-overwrite or another --snip-dir"
        )
    if _has_events(path) and not overwrite and not resuming:
        raise SnipError(
            f"run directory {path}: holds the events of an earlier run; resume from its checkpoint (--load), "
            "pass --snip-overwrite or choose another --snip-dir"
        )
    return difference[0] if difference else None


def _has_events(path: Path) -> bool:
    try:
        return (path / EVENTS).stat().st_size > 0
    except OSError:
        return False


def _first_difference(old: Any, new: Any, key: str = "") -> tuple[str, str, str] | None:
    """(dotted key, old value, new value) of the first difference, in the order of ``new``'s keys."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*new, *(name for name in old if name not in new)]:
            dotted = f"{key}.{name}" if key else str(name)
            if name not in old or name not in new:
                pair = [json.dumps(side[name]) if name in side else "absent" for side in (old, new)]
                return dotted, pair[0], pair[1]
            if (found := _first_difference(old[name], new[name], dotted)) is not None:
                return found
        return None
    if (type(old) is type(new) and old == new) or _equal_numbers(old, new):
        return None
    return key, json.dumps(old), json.dumps(new)


def _equal_numbers(old: Any, new: Any) -> bool:
    both = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new))
    return both and old == new


def _step_files(path: Path, extra: str = "") -> Iterator[tuple[int, Path]]:
    """Our own files in the step folders (with ``extra`` the ones kept aside); anything else there is left alone."""
    for folder, suffix in STEP_FILES.items():
        for file in sorted((path / folder).iterdir()):
            if (step := step_of(file, suffix + extra)) is not None:
                yield step, file


def _cut_back(path: Path, step: int) -> int:
    """Leave only what was recorded before ``step``; later step files get the suffix ``.1``. Raises OSError."""
    for file_step, file in _step_files(path):
        if file_step >= step:
            file.replace(file.with_name(file.name + ".1"))
    return cut_back(path / EVENTS, step) + cut_back(path / METRICS, step)


def _clear(path: Path) -> int:
    """Remove an earlier run's files, by their names. Raises OSError."""
    for _, file in [*_step_files(path), *_step_files(path, ".1")]:
        file.unlink()
    for name in (EVENTS, METRICS, REPORT):
        for file in (path / name, path / f"{name}.1"):
            file.unlink(missing_ok=True)
    return 0
