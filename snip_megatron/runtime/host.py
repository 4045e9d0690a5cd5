"""What SNIP uses of a training loop, its host: Megatron, Megatron Bridge, or a plain torch loop.

:class:`Host` does not change during a run. A :class:`HostStep` is made for every training step. Further, what passes
between the controller, probes, kernels and loggers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from snip_megatron.precision import PrecisionMap
from snip_megatron.sensitivity.recorder import TokenShard
from snip_megatron.sensitivity.reduction import ProbeGroups
from snip_megatron.sensitivity.table import SinkRow, StatisticsTable
from snip_megatron.sensitivity.update_error import StepScale
from snip_megatron.sensitivity.updates import Update

Change = Callable[[torch.Tensor], torch.Tensor]
"""Returns the residual stream that replaces the one it is given."""


@dataclass(frozen=True)
class Place:
    """The module whose first argument, or ``hidden_states``, is the residual stream at the beginning of a sub-block.

    ``boundary`` is the index of the sub-block, and ``recomputed`` whether the backward recomputes the module alone.
    """

    module: nn.Module
    boundary: int
    recomputed: bool = False


@dataclass(frozen=True)
class Strand:
    """Consecutive sub-blocks of this rank on one residual stream.

    ``output`` is the module whose output, or the first of whose outputs, is the stream after the last of them. Unless
    the stream ``ends`` there, another chunk of the model goes on.
    """

    places: Sequence[Place]
    output: nn.Module
    ends: bool


@dataclass(frozen=True)
class Chunk:
    """What this rank holds of the model in one piece: its parts of residual streams.

    ``enter`` installs a hook that changes the stream before the model's first block; None on other chunks.
    """

    strands: Sequence[Strand]
    enter: Callable[[Change], RemovableHandle] | None = None


@dataclass(frozen=True)
class LocalSink:
    """This rank's part of a parameter beside the linears that gradient errors reach.

    ``row`` is its index among the model's sinks, ``replicated`` whether all tensor parallel ranks hold the same one,
    and ``first_row`` the global index of its first row.
    """

    row: int
    weight: nn.Parameter
    replicated: bool = False
    first_row: int = 0


@dataclass(frozen=True)
class Host:
    """What does not change during a run.

    Attributes:
        sinks, local_sinks: the sinks of the whole model, and those of this rank.
        sharded: whether a rank holds a part of the optimizer's state only.
        tokens: tokens of a microbatch on this rank; None if only the passes tell.
        pass_group: a pass runs a multiple of this number of microbatches, if the step has so many.
        in_flight: number of microbatches of a pass → how many of them hold activations at a time.
        gathers: whether inputs of column-parallel linears are kept as token shards (sequence parallelism).
        recomputes: whether the backward recomputes whole blocks, one at a time.
        recomputing: whether a forward that runs now may be a repetition in the backward, of one that had gradients.
        whole: returns all of a tensor that torch may have sharded over ranks. Collective if it has.
    """

    groups: ProbeGroups
    device: torch.device
    chunks: Sequence[Chunk]
    hidden: int
    shard: TokenShard
    sinks: tuple[SinkRow, ...]
    local_sinks: Sequence[LocalSink]
    sharded: bool = False
    tokens: int | None = None
    pass_group: int = 1
    in_flight: Callable[[int], float] = float
    gathers: bool = False
    recomputes: bool = False
    recomputing: Callable[[], bool] = lambda: False
    whole: Change = lambda tensor: tensor


class HostStep(Protocol):
    """One training step that is still to come, and its microbatches on this rank."""

    step: int
    microbatches: int

    @property
    def sequences(self) -> int:
        """Number of sequences into which a microbatch can be cut; 1 if a pass takes it whole."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Leave weights, optimizer, random states, data order and gradients unchanged by the passes in this context."""

    def run(self, microbatches: int, sequences: int) -> None:
        """Run forward and backward of the first sequences of the first microbatches into zeroed gradients.

        Every call draws the same random numbers, and sends tokens to the same experts, as the first one.
        """

    def gradient_scale(self) -> float:
        """Return the factor from the first pass's gradients, summed over data parallel ranks, to those of the mean
        token loss. Collective.
        """

    def gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """Return the gradient that the last pass accumulated, complete for the tokens of this data parallel rank.

        It may be changed in place.
        """

    def join_gradients(self) -> None:
        """Add up the gradients of a parameter that two pipeline stages share, in place. Collective."""

    def update_of(self, weight: nn.Parameter) -> Update | None:
        """Return the optimizer's next update of this rank's elements, None if it has none. Raises SnipError if it is
        unknown.
        """


# -- between the parts of a run ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class ProbeResult:
    """What the probes of one update measured, which all ranks have made before a step.

    Attributes:
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
