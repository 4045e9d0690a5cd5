"""SNIP's figures in the host framework's own loggers: the common part of all sinks.

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
        a probe and ``formats`` of a validation become part of the name, so that those of one step stay separate. Other
        texts are left out.
        """
        name = "/".join([kind, *(fields[each] for each in ("kind", "formats") if isinstance(fields.get(each), str))])
        self._guarded(lambda: self._write(step, scalars(f"{name}/", fields) | {f"{PREFIX}{name}/happened": 1}))

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """Write the map adopted before training step ``step`` as the table ``snip/map`` with one row a linear.

        Also writes ``snip/gemms/<format>``, the number of GEMMs in each format, and ``snip/solve/seconds``, the solving
        time, if the solver made the map.
        """
        names = [str(name) for name in (precision_map.linears() if linears is None else linears)]
        self._guarded(lambda: self._write_map(step, precision_map, names))

    @abstractmethod
    def _write(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Write named figures. May raise."""

    @abstractmethod
    def _write_map(self, iteration: int, precision_map: PrecisionMap, linears: Sequence[str]) -> None:
        """Write a map and its counts. May raise."""

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
                with contextlib.suppress(OSError, ValueError):
                    print(
                        f"snip: {self.name}: {error}; training goes on without these figures",
                        file=sys.stderr,
                        flush=True,
                    )
            self.last_error = f"{type(error).__name__}: {error}"


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


def map_rows(precision_map: PrecisionMap, linears: Iterable[str]) -> list[list[str]]:
    """Return one row for each linear: its name and the formats of fprop, dgrad and wgrad."""
    return [[name, *(precision_map.format_of(name, gemm).value for gemm in Gemm)] for name in linears]


def map_figures(precision_map: PrecisionMap, rows: Iterable[Sequence[str]]) -> dict[str, float]:
    """Return the number of GEMMs by format, and the solving time if the solver made the map."""
    counts = Counter(fmt for _, *formats in rows for fmt in formats)
    return scalars("", {"gemms": dict(counts), "solve": {"seconds": precision_map.solve_seconds}})


MAP_COLUMNS = ("linear", *(gemm.value for gemm in Gemm))
"""Column names of :func:`map_rows`."""
