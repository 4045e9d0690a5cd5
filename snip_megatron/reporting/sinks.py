"""SNIP's figures in the host framework's own loggers: Megatron's wandb run and TensorBoard log.

Megatron opens both on the **last** rank, and its writers are None on the others. So sinks show only what the last rank
knows, such as the map and the loss; rank 0 writes the run directory.

Loggers count iterations (completed steps). The metrics of the 0-based training step N belong to iteration N + 1, and
events before ``train_step(N)`` to iteration N. A logger that fails never stops training: the first failure is printed,
and after a few failures in a row the sink stops writing.
"""

from __future__ import annotations

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from snip_megatron.precision import Gemm, PrecisionMap
from snip_megatron.records.storage import jsonable
from snip_megatron.runtime.protocols import Sink

PREFIX = "snip/"
GIVE_UP_AFTER = 3
"""Number of failures in a row after which a sink stops writing. Each may cost the training thread a time-out."""
MAP_COLUMNS = ("linear", *(gemm.value for gemm in Gemm))


class Sinks:
    """Several sinks that receive the same calls (see :class:`snip_megatron.runtime.protocols.Sink`), or none."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def begin_step(self, step: int) -> None:
        """Note the begin of training step ``step``."""
        for sink in self._sinks:
            sink.begin_step(step)

    def metric(self, step: int, /, **figures: float | None) -> None:
        """Write the figures of training step ``step``."""
        for sink in self._sinks:
            sink.metric(step, **figures)

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """Write an event before training step ``step``."""
        for sink in self._sinks:
            sink.event(step, kind, **fields)

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """Write the map adopted before training step ``step``."""
        names = None if linears is None else list(linears)
        for sink in self._sinks:
            sink.precision_map(step, precision_map, names)


class WriterSink(ABC):
    """Base class of sinks over a host framework's ``writer``. A writer of None disables the sink.

    No method raises. ``last_error`` holds the last failure; the first one is printed to standard error.
    """

    name = ""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._failures = 0
        self.last_error: str | None = None

    @property
    def active(self) -> bool:
        """Whether the sink still writes."""
        return self._writer is not None and self._failures < GIVE_UP_AFTER

    def begin_step(self, step: int) -> None:  # noqa: B027 - most loggers do not need it
        """Note the begin of training step ``step``."""

    def metric(self, step: int, /, **figures: float | None) -> None:
        """Write the figures of training step ``step`` as ``snip/<name>``. None, NaN and Inf are left out."""
        self._guarded(lambda: self._write(step + 1, scalars("", figures)))

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """Write the numbers of an event before training step ``step`` as ``snip/<kind>/<field>``.

        Numbers in a mapping (``achieved_per_stage``) become ``snip/<kind>/<field>/<key>``. The text fields ``kind`` of
        a probe and ``formats`` of a validation become part of the name, so that those of one step stay separate.
        """
        name = "/".join([kind, *(fields[each] for each in ("kind", "formats") if isinstance(fields.get(each), str))])
        self._guarded(lambda: self._write(step, scalars(f"{name}/", fields) | {f"{PREFIX}{name}/happened": 1}))

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """Write the map adopted before training step ``step`` as the table ``snip/map`` with one row a linear.

        Also writes ``snip/gemms/<format>``, the number of GEMMs in each format, and ``snip/solve/seconds``, the solving
        time, if the solver made the map.
        """
        names = [str(name) for name in (precision_map.linears() if linears is None else linears)]
        rows = [[name, *(precision_map.format_of(name, gemm).value for gemm in Gemm)] for name in names]
        counts = Counter(fmt for _, *formats in rows for fmt in formats)
        figures = scalars("", {"gemms": dict(counts), "solve": {"seconds": precision_map.solve_seconds}})
        self._guarded(lambda: self._write_map(step, rows, figures))

    @abstractmethod
    def _write(self, iteration: int, figures: Mapping[str, Any]) -> None:
        """Write named figures. May raise."""

    @abstractmethod
    def _write_map(self, iteration: int, rows: Sequence[Sequence[str]], figures: Mapping[str, float]) -> None:
        """Write a map, a row of MAP_COLUMNS for each linear, and figures about it. May raise."""

    def _guarded(self, send: Callable[[], None]) -> None:
        if not self.active:
            return
        # A logger may raise any error of its service, network or file system. None may reach the training loop.
        try:
            send()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self.last_error is None:
                line = f"snip: {self.name}: {error}; training goes on without these figures"
                with contextlib.suppress(OSError, ValueError):
                    print(line, file=sys.stderr, flush=True)
            self.last_error = f"{type(error).__name__}: {error}"


class TensorBoardSink(WriterSink):
    """A sink that writes to ``writer``, a ``SummaryWriter``, which accepts figures in any order of iterations."""

    name = "TensorBoard"

    def _write(self, iteration: int, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, iteration)

    def _write_map(self, iteration: int, rows: Sequence[Sequence[str]], figures: Mapping[str, float]) -> None:
        lines = [MAP_COLUMNS, ["---"] * len(MAP_COLUMNS), *rows]
        self._writer.add_text(f"{PREFIX}map", "\n".join(f"| {' | '.join(line)} |" for line in lines), iteration)
        self._write(iteration, figures)


class WandbSink(WriterSink):
    """A sink that writes to ``writer``, the ``wandb`` module with an open run or a run object.

    Rows have Megatron's iteration as wandb's step, so that the panels line up with its ``lm loss``. wandb drops rows
    below its current step. Reading that step may take up to 30 s, so the sink keeps track of it by ``begin_step(N)`` at
    the start of every ``train_step(N)``, when Megatron has logged up to iteration N. Late figures join that row.
    """

    name = "wandb"

    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self._iteration = 0

    def begin_step(self, step: int) -> None:
        """Note the begin of training step ``step``. Later rows have at least iteration ``step``."""
        self._iteration = max(self._iteration, int(step))

    def _write(self, iteration: int, figures: Mapping[str, Any]) -> None:
        self.begin_step(iteration)
        if figures:
            self._writer.log(dict(figures), step=self._iteration)

    def _write_map(self, iteration: int, rows: Sequence[Sequence[str]], figures: Mapping[str, float]) -> None:
        import wandb  # a writer exists, so it is installed; optional otherwise

        self._write(iteration, {f"{PREFIX}map": wandb.Table(columns=list(MAP_COLUMNS), data=list(rows)), **figures})


def scalars(prefix: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of ``fields`` by their logged name. Nested mappings become further levels."""
    found: dict[str, float] = {}
    for name, value in fields.items():
        plain = jsonable(value)
        if isinstance(plain, dict):
            found |= scalars(f"{prefix}{name}/", plain)
        elif isinstance(plain, (int, float)) and not isinstance(plain, bool) and math.isfinite(plain):
            found[f"{PREFIX}{prefix}{name}"] = plain
    return found
