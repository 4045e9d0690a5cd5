"""What SNIP needs from a training loop, its host: Megatron, Megatron Bridge, or a plain torch loop.

A :class:`Host` holds for the whole run, and a :class:`HostStep` for one training step. The other classes pass between
the controller, probes, kernels and loggers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from snip_megatron.precision import PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity.recorder import TokenShard
from snip_megatron.sensitivity.reduction import ProbeGroups
from snip_megatron.sensitivity.table import SinkRow, StatisticsTable
from snip_megatron.sensitivity.update_error import AdamWState, StepScale

Change = Callable[[torch.Tensor], torch.Tensor]
"""Returns the tensor that replaces its argument."""


@dataclass(frozen=True)
class StreamReader:
    """The module that reads the residual stream at the beginning of a sub-block."""

    module: nn.Module  # the stream is its first argument, or ``hidden_states``
    boundary: int  # index of the sub-block
    recomputed: bool = False  # whether the backward recomputes this module alone


@dataclass(frozen=True)
class StreamSegment:
    """Consecutive sub-blocks of this rank on one residual stream."""

    readers: Sequence[StreamReader]  # the module that reads the stream, for each sub-block
    output: nn.Module  # the module whose output, or first output, is the stream after the last sub-block
    is_last: bool  # whether the stream ends on this rank


@dataclass(frozen=True)
class LocalSink:
    """This rank's shard of a parameter beside the linears that gradient errors reach."""

    row: int  # index of the parameter among the model's sinks
    weight: nn.Parameter  # the shard
    replicated: bool = False  # whether all tensor parallel ranks hold the same values
    first_row: int = 0  # global index of the shard's first row


@dataclass(frozen=True)
class Host:
    """What does not change during a run."""

    groups: ProbeGroups  # process groups of the reductions of probes
    device: torch.device  # device of the model on this rank
    segments: Sequence[StreamSegment]  # the residual streams on this rank, of all of its model chunks
    hidden: int
    shard: TokenShard  # the tokens of this rank
    sinks: tuple[SinkRow, ...]  # the sinks of the whole model
    local_sinks: Sequence[LocalSink]  # the sinks of this rank
    # installs a hook that changes the stream before the model's first block. None if that is on another rank
    hook_input: Callable[[Change], RemovableHandle] | None = None
    optimizer_sharded: bool = False  # whether each rank holds a shard of the optimizer's state
    tokens: int | None = None  # tokens of a microbatch on this rank. None if only the passes tell
    pass_group: int = 1  # A pass runs a multiple of this number of microbatches, if the step has so many
    # number of microbatches of a pass → how many of them hold activations at a time
    in_flight: Callable[[int], float] = float
    sequence_parallel: bool = False  # whether inputs of column-parallel linears are saved as token shards
    recomputes_blocks: bool = False  # whether the backward recomputes whole blocks, one at a time
    # returns whether a forward that runs now may be a recomputation in the backward
    is_recomputing: Callable[[], bool] = lambda: False
    # returns all of a tensor that torch may have sharded over ranks. Collective if it has
    full_tensor: Change = lambda tensor: tensor
    # whether no rank waits for another one inside a pass, so that a pass may fail on one rank
    passes_alone: bool = False
    gathers_updates: bool = False  # whether :meth:`HostStep.update_of` is a collective


class HostStep(Protocol):
    """A training step that has not run yet, and its microbatches on this rank."""

    step: int
    microbatches: int

    @property
    def sequences(self) -> int:
        """Number of sequences into which a microbatch can be cut. 1 if a pass takes it whole."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context that restores weights, optimizer, random states, data order and gradients at its end."""

    def prepare(self, microbatches: int, sequences: int) -> None:
        """Prepare a pass over the first sequences of the first microbatches, as far as no other rank is needed.

        Every pass draws the same random numbers and routes tokens to the same experts as the first one.
        """

    def run(self) -> None:
        """Run forward and backward of the prepared pass. Gradients are zeroed before."""

    def losses(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run forwards of the prepared pass without gradients, in which experts are chosen anew.

        Returns for each microbatch the loss of every token and its weight, 0 for tokens that the loss leaves out. Empty
        on ranks that compute no loss.
        """

    def gradient_scale(self) -> float:
        """Return the factor from the gradients of a pass, summed over data parallel ranks, to those of the mean loss.

        The mean is over tokens. Collective.
        """

    def gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """Return the gradient that the last pass accumulated over the tokens of this data parallel rank.

        The caller may change it in place.
        """

    def join_gradients(self) -> None:
        """Add up the gradients of a parameter that two pipeline stages share, in place. Collective."""

    def update_of(self, weight: nn.Parameter) -> AdamWState | None:
        """Return the optimizer's next update of this rank's elements. None if the rank has none.

        Raises SnipError if the update rule is not known.
        """


# -- between the parts of a run ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class ProbeResult:
    """What the probes of one update measured."""

    table: StatisticsTable  # the statistics, equal on all ranks
    seconds: dict[str, float]  # kind of pass, or ``reduction`` → its seconds on this rank
    scale: StepScale  # scales of the gradient, and the tokens of the probe over all ranks
    microbatches: int  # microbatches of each pass on each rank
    sequences: int = 1  # sequences of each microbatch that the passes took

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the kind and the fields of one event for each pass."""
        for kind, seconds in self.seconds.items():
            fields = {"kind": kind, "seconds": seconds, "tokens": self.scale.tokens, "wait_s": seconds}
            if kind == "reduction":
                yield "collect", fields
            else:
                yield "probe", fields | {"passes": self.microbatches}


class Sink(Protocol):
    """Loggers of a run beside the run directory (:mod:`snip_megatron.reporting.sinks`). No method raises."""

    def begin_step(self, step: int) -> None: ...

    def metric(self, step: int, /, **figures: float | None) -> None: ...

    def event(self, step: int, kind: str, /, **fields: Any) -> None: ...

    def statistics(self, step: int, table: StatisticsTable, config: SnipConfig) -> None: ...

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None: ...
