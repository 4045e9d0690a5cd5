"""The arguments of a training step that a probe uses, and one call of Megatron's schedule with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches

from snip_megatron.layers.context import StepContext
from snip_megatron.megatron import compat


@dataclass(frozen=True)
class LoopShape:
    """Sizes of the training loop.

    Attributes:
        seq_length: Tokens of a sequence, before context parallelism splits it.
        micro_batch_size: Sequences of a microbatch.
        padded_vocab_size: Rows of the word embedding over all tensor parallel ranks.
        virtual_stages: Model chunks per rank under interleaved pipelining, else None.
        optimizer_sharded: Whether optimizer states are sharded over data parallel ranks.
        context_parallel: Size of the context parallel group.
    """

    seq_length: int
    micro_batch_size: int
    padded_vocab_size: int
    virtual_stages: int | None
    optimizer_sharded: bool
    context_parallel: int = 1

    def tokens(self, microbatches: int, data_ranks: int) -> int:
        """Tokens of ``microbatches`` on ``data_ranks`` ranks, the size of the data and context parallel group."""
        return microbatches * data_ranks * self.seq_length * self.micro_batch_size // self.context_parallel


@dataclass(frozen=True)
class StepCall:
    """The arguments of Megatron's ``train_step`` that a probe needs.

    Attributes:
        step: Number of the step, counted from 0.
        num_microbatches: Microbatches of the step on this rank.
        clip: Factor by which gradient clipping scaled the gradient of the last step.
    """

    step: int
    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: list[Any]
    optimizer: Any
    config: Any
    forward_backward_func: Callable[..., Any]
    num_microbatches: int = field(default_factory=get_num_microbatches)
    clip: float = 1.0


@contextmanager
def undisturbed(call: StepCall, context: StepContext) -> Iterator[compat.RandomState]:
    """Restore random states, gradients and Megatron's rerun machine after the passes run inside this context.

    Yields the random states at entry, from which each pass can start. :func:`run_schedule` restores the state of
    expert routers and the attention logits after every pass.
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
    """Run Megatron's schedule, forward and backward, over ``microbatches`` into zeroed gradients.

    Args:
        call: Arguments of the training step.
        shape: Sizes of the training loop.
        microbatches: Microbatches of this data parallel rank in order, 0 being the first of the step. A number may
            occur twice, and may lie beyond the step.
        forward_step_func: Replaces the forward step of the training loop.
    """
    with ExitStack() as stack:
        for chunk in call.model:
            chunk.zero_grad_buffer()  # before no_sync, which must see fresh buckets
        call.optimizer.zero_grad()  # the step of an FP32 optimizer leaves p.grad an alias of main_grad
        for chunk in call.model:
            stack.enter_context(chunk.no_sync())
        stack.enter_context(compat.routers_kept(call.model))
        stack.enter_context(compat.attention_logits_kept(call.model))
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
