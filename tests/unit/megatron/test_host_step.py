"""What a call of the schedule leaves behind."""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from snip_megatron.megatron.host import MegatronStep, StepCall
from snip_megatron.sensitivity.reduction import ProbeGroups


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
    args = SimpleNamespace(seq_length=8, micro_batch_size=1)
    MegatronStep(call, args, ProbeGroups(None, None)).schedule([0])  # type: ignore[arg-type]
    assert fresh.current_max_attn_logits is None
    assert used.current_max_attn_logits.tolist() == [1.0, 3.0]
