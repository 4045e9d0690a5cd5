"""Sizes that a probe works with, and what a call of the schedule leaves behind."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from snip_megatron.megatron.probing.probe_call import LoopShape, StepCall, run_schedule


def test_context_parallel_peers_share_the_tokens_of_their_sequences() -> None:
    """Two microbatches of 4 sequences of 128 tokens on each of three copies, cut among four ranks or not."""
    whole = LoopShape(128, 4, 1000, None, optimizer_sharded=False)
    shared = LoopShape(128, 4, 1000, None, optimizer_sharded=False, context_parallel=4)
    assert whole.tokens(2, data_ranks=3) == shared.tokens(2, data_ranks=12) == 2 * 3 * 4 * 128


class Attention(torch.nn.Module):
    """Keeps the largest logits until Megatron clips by them after the step, as Transformer Engine's attention does."""

    current_max_attn_logits: torch.Tensor | None = None

    def forward(self, logits: torch.Tensor) -> None:
        seen = self.current_max_attn_logits
        self.current_max_attn_logits = logits if seen is None else torch.max(seen, logits)


class Chunk(torch.nn.Sequential):
    def zero_grad_buffer(self) -> None: ...

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


def test_attention_logits_of_a_probe_do_not_clip_the_step() -> None:
    """--qk-clip: a noise pass has larger ones."""
    fresh, used = Attention(), Attention()
    used(torch.tensor([1.0, 3.0]))

    def schedule(model: list[Chunk], **_: Any) -> None:
        for attention in model[0]:
            attention(torch.tensor([2.0, 2.0]))

    optimizer = SimpleNamespace(zero_grad=lambda: None)
    call = StepCall(3, lambda: None, None, [Chunk(fresh, used)], optimizer, None, schedule, num_microbatches=1)
    run_schedule(call, LoopShape(8, 1, 16, None, optimizer_sharded=False), [0])
    assert fresh.current_max_attn_logits is None
    assert used.current_max_attn_logits is not None
    assert used.current_max_attn_logits.tolist() == [1.0, 3.0]
