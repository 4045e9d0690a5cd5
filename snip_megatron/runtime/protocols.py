"""What passes between the controller, probes and loggers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from snip_megatron.optimizers.update_error import StepScale
from snip_megatron.precision import PrecisionMap
from snip_megatron.statistics.table import StatisticsTable


@dataclass(frozen=True)
class ProbeResult:
    """What the probes of one update measured, which all ranks have made before a step.

    Attributes:
        table: equal on all ranks.
        seconds: kind of pass, or ``reduction`` → its seconds on this rank.
        scale: scales of the gradient, and the tokens of the probe over all ranks.
        passes: kind of pass → microbatches that went through it on each rank.
        sequences: sequences of each microbatch that the passes took.
    """

    table: StatisticsTable
    seconds: dict[str, float]
    scale: StepScale
    passes: dict[str, int]
    sequences: int = 1

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the kind and the fields of the event of every pass and of the reduction."""
        for kind, seconds in self.seconds.items():
            passes = {"passes": self.passes[kind]} if kind in self.passes else {}
            fields = {"kind": kind, "seconds": seconds, "tokens": self.scale.tokens, **passes, "wait_s": seconds}
            yield "collect" if kind == "reduction" else "probe", fields


@dataclass(frozen=True)
class Unmeasured:
    """Why an update cannot be measured now, in one line and in figures for the event. Equal on all ranks."""

    reason: str
    figures: Mapping[str, float]


class Kernels(Protocol):
    """The kernels of a run, which are compiled beside the training."""

    def begin(self) -> bool:
        """Compile what the map in force runs, and begin to compile what updates and later maps run. Collective.

        Returns whether all ranks have all kernels, equal on all ranks.
        """

    def finish(self, seconds: float = math.inf) -> bool:
        """Wait for this rank's kernels for at most so long. Returns whether the compilation has ended."""

    def complete(self) -> Mapping[str, float]:
        """Begin to use the kernels, once all ranks have theirs. Returns figures for the event; none without kernels."""

    def close(self) -> None:
        """End the compilation."""


class Sink(Protocol):
    """A logger of a run beside the run directory (:mod:`snip_megatron.reporting.sinks`). No method raises."""

    def begin_step(self, step: int) -> None: ...

    def metric(self, step: int, /, **figures: float | None) -> None: ...

    def event(self, step: int, kind: str, /, **fields: Any) -> None: ...

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None: ...
