"""The warm-up of kernels leaves the model's own linear alone. What it launches: tests/distributed/test_warm_up.py."""

import torch
from handles import handle_of

from snip_megatron.layers.context import StepContext
from snip_megatron.layers.warm_up import warm_up_gemms, warm_up_linear
from snip_megatron.precision import ALL_BF16, Format

BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4


def test_the_linear_itself_is_left_alone() -> None:
    handle = handle_of("decoder.layers.1.mlp.linear_fc1", 48, 32, StepContext(seed=3))
    module = handle.module
    before = module.weight.detach().clone()
    linear = warm_up_linear(handle, 16, whole_x=True)
    warm_up_gemms(linear, [(FP8, FP4, FP8), ALL_BF16, (FP4, FP4, BF16)])
    assert linear.handle.state.backwards == 2  # all-bf16 formats run Megatron's own linear
    assert (handle.state.backwards, handle.formats, handle.state.weights._key) == (0, ALL_BF16, None)
    assert module.weight.grad is None
    assert torch.equal(module.weight, before)
    assert linear.x.shape == (16, 32)
    assert linear.g.shape == (16, 48)
