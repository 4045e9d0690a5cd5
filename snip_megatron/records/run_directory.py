"""The run directory, which rank 0 writes (docs/file-formats.md, Run directory).

``step`` is the 0-based training step. Records that are made before or during ``train_step(N)`` have step N. A run that
resumes from a checkpoint of N completed steps continues with step N, so ``resume_step=N`` keeps the records with step <
N.

    run = RunDirectory(path, config, overwrite=False, resume_step=None, facts={...})   # rank 0; may raise SnipError
    run.step_s = 0.41                                       # once a step: duration of the last step
    run.event(8, "probe", kind="statistics", seconds=0.2, tokens=512, wait_s=0.2)
    run.metric(8, loss=3.2, grad_norm=1.1, fp4_fraction=0.75)
    run.write("maps", 12, precision_map.to_json())
    run.close()

Only the constructor raises on an I/O error. Later, a failed write is reported once, kept, and tried again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from snip_megatron.errors import SnipError
from snip_megatron.records.earlier_run import changed_fact_of, check_earlier_run
from snip_megatron.records.lock import check_lock, release_lock, take_lock
from snip_megatron.records.readers import (
    CONFIG,
    EVENTS,
    METRICS,
    REPORT,
    RUN_SCHEMA,
    SCORES_SCHEMA,
    STEP_FILES,
    TIMINGS,
    step_files,
    step_path,
)
from snip_megatron.records.storage import Writer, cut_back, dump_json, jsonable, write_atomically


class RunDirectory:
    """The writer of a run directory. Only rank 0 constructs one.

    Args:
        path: the directory. It is created if it does not exist.
        config: the configuration of the run. On a restart it is compared with the configuration in the directory.
        facts: values that may differ between restarts (layout, versions, command line). The latest are kept.
        overwrite: allows to remove an earlier run's records. With ``resume_step`` it instead accepts a changed
            ``config`` and keeps the records before that step.
        resume_step: the next training step after a checkpoint was loaded; None for a fresh run. A job that may be a
            restarted one, and found no checkpoint, passes 0.

    Raises:
        SnipError: the directory cannot be written, is written by another job, belongs to another configuration, or
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
            changed = check_earlier_run(self.path, wanted, overwrite=overwrite, resuming=resume_step is not None)
            take_lock(self.path)
            for folder in STEP_FILES:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            changed_fact = None if resume_step is None else changed_fact_of(self.path, facts or {})
            cut = _clear(self.path) if resume_step is None else _cut_back(self.path, resume_step)
            self._body = body
            self._config = dump_json(body).encode()
            write_atomically(self.path / CONFIG, self._config)
        except OSError as error:
            raise SnipError(
                f"run directory {self.path}: cannot be written ({error}); choose another --snip-dir"
            ) from None
        self.writer = Writer(self.path, self._keep_config)
        if resume_step is not None and (resume_step or cut):  # else there was neither a checkpoint nor an earlier run
            self.event(resume_step, "resume", cut_records=cut, changed_key=changed, changed_fact=changed_fact)

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
    def event(
        self, step: int, kind: str, /, *, step_s: float | None = None, wait_s: float | None = None, **fields: Any
    ) -> None:
        """Record an event ``kind`` of a training step, with its own fields but ``time``, ``step`` and ``event``.

        ``step_s`` is the duration of the last step in seconds, by default the attribute, and ``wait_s`` the seconds for
        which the event blocked the training thread.
        """
        record = _stamp(step) | {"event": kind, "step_s": self.step_s if step_s is None else step_s, "wait_s": wait_s}
        self.writer.append(
            self.path / EVENTS, record | {name: value for name, value in fields.items() if name not in record}
        )

    def metric(
        self, step: int, /, loss: float | None, grad_norm: float | None, fp4_fraction: float | None, **fields: Any
    ) -> None:
        """Record the figures of training step ``step``.

        ``fp4_fraction`` is the fp4 share of the FLOPs of the decoder's linears, in [0, 1].
        """
        record = _stamp(step) | {"loss": loss, "grad_norm": grad_norm, "fp4_fraction": fp4_fraction}
        self.writer.append(
            self.path / METRICS, record | {name: value for name, value in fields.items() if name not in record}
        )

    # -- whole files -------------------------------------------------------------------------------------------
    def write(self, folder: str, step: int, content: str | bytes) -> None:
        """Write ``<folder>/step_<step>``, the statistics, the Problem, the map or the plan of a step."""
        data = content.encode() if isinstance(content, str) else content
        self.writer.replace(step_path(self.path, folder, step), data)

    def write_scores(
        self, step: int, scores: Mapping[str, Mapping[str, Mapping[str, float]]], *, version: int | None = None
    ) -> None:
        """Write ``scores/step_<step>.json``: ``scores[option][format]`` holds delta_loss, delta_weight and q.

        ``version`` is that of the map that was solved from them; None for a map that was not solved.
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


def _stamp(step: int) -> dict[str, Any]:
    return {"time": round(time.time(), 3), "step": int(step)}


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
