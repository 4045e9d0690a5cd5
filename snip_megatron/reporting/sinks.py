"""SNIP's figures in the host's own loggers: what a sink takes, and what all sinks share.

Loggers count iterations (steps completed): the metrics of the 0-based training step N belong to iteration N + 1, events
before ``train_step(N)`` to iteration N. A logger that fails never stops training: it is said once, and given up after a
few failures in a row.
"""

from __future__ import annotations

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from snip_megatron.precision import Gemm, PrecisionMap
from snip_megatron.reporting.storage import jsonable

PREFIX = "snip/"
GIVE_UP_AFTER = 3
"""Failures in a row after which a sink falls silent: each one may cost the training thread a time-out."""


class Sink(Protocol):
    """Where figures go beside the run directory. No method raises."""

    def begin_step(self, step: int) -> None:
        """Training step ``step`` begins."""

    def metric(self, step: int, /, **figures: float | None) -> None:
        """Figures of training step ``step``."""

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """An event before training step ``step``."""

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """The map adopted before training step ``step``; ``linears``: all names of the model."""


class Sinks:
    """Several sinks as one; without any a no-op."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def begin_step(self, step: int) -> None:
        """See :class:`Sink`."""
        for sink in self._sinks:
            sink.begin_step(step)

    def metric(self, step: int, /, **figures: float | None) -> None:
        """See :class:`Sink`."""
        for sink in self._sinks:
            sink.metric(step, **figures)

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """See :class:`Sink`."""
        for sink in self._sinks:
            sink.event(step, kind, **fields)

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """See :class:`Sink`."""
        names = None if linears is None else list(linears)
        for sink in self._sinks:
            sink.precision_map(step, precision_map, names)


class WriterSink(ABC):
    """A sink over a host's ``writer``; None makes it a no-op.

    No method raises: a failure is remembered in ``last_error`` and said once on standard error.
    """

    name = ""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._failures = 0
        self.last_error: str | None = None

    @property
    def active(self) -> bool:
        """Whether figures are still sent."""
        return self._writer is not None and self._failures < GIVE_UP_AFTER

    def begin_step(self, step: int) -> None:  # noqa: B027 - most loggers need not know
        """Training step ``step`` begins."""

    def metric(self, step: int, /, **figures: float | None) -> None:
        """Figures of training step ``step``, as ``snip/<name>``. None, NaN and Inf are left out."""
        self._guarded(lambda: self._write(step + 1, scalars("", figures)))

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """The numbers of an event before training step ``step``, as ``snip/<kind>/<field>``.

        Numbers in a mapping (``achieved_per_stage``) become ``snip/<kind>/<field>/<key>``. A text field ``kind`` (of a
        probe) joins the name, so that the probes of one step stay apart; other texts are left out.
        """
        name = f"{kind}/{fields['kind']}" if isinstance(fields.get("kind"), str) else kind
        self._guarded(lambda: self._write(step, scalars(f"{name}/", fields) | {f"{PREFIX}{name}/happened": 1}))

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """The map adopted before training step ``step``: the table ``snip/map``, one row a linear, and what it counts.

        ``snip/gemms/<format>``: GEMMs in that format. ``snip/solve/seconds``: of the solver, where it made the map.
        """
        names = [str(name) for name in (precision_map.linears() if linears is None else linears)]
        self._guarded(lambda: self._write_map(step, precision_map, names))

    @abstractmethod
    def _write(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Send named figures; may raise."""

    @abstractmethod
    def _write_map(self, iteration: int, precision_map: PrecisionMap, linears: Sequence[str]) -> None:
        """Send a map and its counts; may raise."""

    def _guarded(self, send: Callable[[], None]) -> None:
        if not self.active:
            return
        # A logger raises whatever its service, its network or its file system raises; none of it may reach training.
        try:
            send()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self.last_error is None:
                with contextlib.suppress(OSError, ValueError):
                    print(
                        f"snip: {self.name}: {error}; training goes on without these figures",
                        file=sys.stderr,
                        flush=True,
                    )
            self.last_error = f"{type(error).__name__}: {error}"


def scalars(prefix: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of ``fields`` by their logged name; mappings inside become further levels."""
    found: dict[str, float] = {}
    for name, value in fields.items():
        plain = jsonable(value)
        if isinstance(plain, dict):
            found |= scalars(f"{prefix}{name}/", plain)
        elif isinstance(plain, (int, float)) and not isinstance(plain, bool) and math.isfinite(plain):
            found[f"{PREFIX}{prefix}{name}"] = plain
    return found


def map_rows(precision_map: PrecisionMap, linears: Iterable[str]) -> list[list[str]]:
    """A row a linear: its name and the formats of fprop, dgrad and wgrad."""
    return [[name, *(precision_map.format_of(name, gemm).value for gemm in Gemm)] for name in linears]


def map_figures(precision_map: PrecisionMap, rows: Iterable[Sequence[str]]) -> dict[str, float]:
    """GEMMs by format, and the solver's seconds where it made the map."""
    counts = Counter(fmt for _, *formats in rows for fmt in formats)
    return scalars("", {"gemms": dict(counts), "solve": {"seconds": precision_map.solve_seconds}})


MAP_COLUMNS = ("linear", *(gemm.value for gemm in Gemm))
"""Heads of :func:`map_rows`."""
