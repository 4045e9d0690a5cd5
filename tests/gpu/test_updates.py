"""Updates in one launch have the bits of Megatron's clipping, Transformer Engine's FusedAdam and the copy to bf16."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snip_megatron.megatron.compat import host_work

optimizers = pytest.importorskip("transformer_engine.pytorch.optimizers")
pytestmark = pytest.mark.usefixtures("hopper")
SIZES = [(1536 * 2048, 2048 * 768, 2048), (100, 3, 70_001)]
"""Of two groups of parameters. Blocks of the second are not aligned."""


class Trained:
    """Parameters of two groups, their copies in bf16, and their optimizer."""

    def __init__(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(1)
        groups: list[dict[str, Any]] = [
            {"params": [torch.randn(size, device="cuda", generator=generator) for size in sizes], "weight_decay": decay}
            for sizes, decay in zip(SIZES, (0.1, 0.0), strict=True)
        ]
        self.parameters = [each for group in groups for each in group["params"]]
        self.models = [each.bfloat16() for each in self.parameters]
        self.optimizer = optimizers.FusedAdam(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)

    def state(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[each] for each in self.parameters]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        return [*self.parameters, *self.models, *moments]


@pytest.mark.parametrize("norm_on_host", [True, False])
def test_bits_are_those_of_three_passes(norm_on_host: bool) -> None:
    fused, plain = Trained(), Trained()
    copies = SimpleNamespace(shards=lambda: list(zip(fused.parameters, fused.models, strict=True)), is_current=False)
    owner = SimpleNamespace(
        optimizer=fused.optimizer,
        config=SimpleNamespace(log_num_zeros_in_grad=False),
        get_parameters=lambda: fused.parameters,
    )
    host_work._Update(owner, copies)  # type: ignore[arg-type]
    generator = torch.Generator(device="cuda").manual_seed(2)
    for step in range(5):
        size = 10.0 ** (step - 2)  # the norm is below the largest in the first steps
        for ours, theirs in zip(fused.parameters, plain.parameters, strict=True):
            ours.grad = torch.randn(ours.shape, device="cuda", generator=generator) * size / 1e3
            theirs.grad = ours.grad.clone()
        norm: Any = torch.stack([each.grad.norm() for each in plain.parameters if each.grad is not None]).norm()
        norm = norm.item() if norm_on_host else norm.view(1)
        host_work._clip(fused.parameters, 1.0, norm)
        fused.optimizer.step()
        host_work.clip_gradients(plain.parameters, 1.0, norm)
        plain.optimizer.step()
        if not copies.is_current:
            torch._foreach_copy_(fused.models, fused.parameters)
        torch._foreach_copy_(plain.models, plain.parameters)
        assert copies.is_current == (step > 0)
        assert all(map(torch.equal, fused.state(), plain.state()))


def test_the_sample_before_training_has_the_same_bits() -> None:
    inner = Trained().optimizer
    assert host_work.same_update(inner.multi_tensor_adam, torch.device("cuda", torch.cuda.current_device()))
    assert not host_work.same_update(lambda *_: None, torch.device("cuda", torch.cuda.current_device()))
