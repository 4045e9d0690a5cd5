"""What a probe is given of the training loop, and one call of Megatron's schedule over microbatches of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from snip_megatron.layers.context import StepContext
from snip_megatron.megatron import compat
from snip_megatron.statistics.measured import Measured


@dataclass(frozen=True)
class LoopShape:
    """Sizes of the training loop that the schedule asks for.

    Attributes:
        seq_length, micro_batch_size: of one microbatch.
        padded_vocab_size: rows of the word embedding over all tensor parallel ranks.
        virtual_stages: model chunks a rank, under interleaved pipelining.
        optimizer_sharded: whether optimizer states are sharded over data parallel ranks.
        context_parallel: ranks that share the tokens of a sequence.
    """

    seq_length: int
    micro_batch_size: int
    padded_vocab_size: int
    virtual_stages: int | None
    optimizer_sharded: bool
    context_parallel: int = 1

    def tokens(self, microbatches: int, data_ranks: int) -> int:
        """Of ``microbatches`` on each of ``data_ranks`` ranks, context parallel peers counted among these."""
        return microbatches * data_ranks * self.seq_length * self.micro_batch_size // self.context_parallel


@dataclass(frozen=True)
class StepCall:
    """What ``train_step`` was called with, as far as a probe needs it.

    Attributes:
        clip: what gradient clipping multiplied the last step's gradient by.
        measured: what earlier updates measured of options forced alone.
    """

    step: int
    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: list[Any]
    optimizer: Any
    config: Any
    forward_backward_func: Callable[..., Any]
    num_microbatches: int
    clip: float
    measured: Measured | None = None


@contextmanager
def undisturbed(call: StepCall, context: StepContext) -> Iterator[compat.RandomState]:
    """Passes inside leave random states, gradients and the rerun machine as they were. Gives the random states.

    So do the routers of experts, pass by pass (:func:`run_schedule`): every pass routes from the same state.
    """
    states = compat.rng_state()
    try:
        with compat.rerun_disabled(), compat.quiet_schedule(call.config):
            yield states
    finally:
        context.probing, context.forcing = False, None
        for chunk in call.model:
            chunk.zero_grad_buffer()
        call.optimizer.zero_grad()
        compat.set_rng_state(states)


def run_schedule(
    call: StepCall,
    shape: LoopShape,
    microbatches: Sequence[int],
    forward_step_func: Callable[..., Any] | None = None,
) -> None:
    """One forward and backward over ``microbatches``, numbers counted from the step's first, into cleared gradients.

    Args:
        microbatches: of this data parallel rank, in order; a number may come twice, or lie beyond the step.
        forward_step_func: instead of the training loop's.
    """
    with ExitStack() as stack:
        for chunk in call.model:
            chunk.zero_grad_buffer()  # zero first: no_sync must see fresh buckets
        call.optimizer.zero_grad()  # an FP32 optimizer's step leaves p.grad an alias of main_grad
        for chunk in call.model:
            stack.enter_context(chunk.no_sync())
        stack.enter_context(compat.routers_kept(call.model))
        call.forward_backward_func(
            forward_step_func=forward_step_func or call.forward_step_func,
            data_iterator=compat.peek(call.data_iterator, max(microbatches) + 1).iterator(microbatches),
            model=call.model,
            num_microbatches=len(microbatches),
            seq_length=shape.seq_length,
            micro_batch_size=shape.micro_batch_size,
            decoder_seq_length=shape.seq_length,
            forward_only=False,
        )
