"""Which formats are run before training, and that the warm-up leaves the model's own linear alone."""

import itertools

import pytest
import torch
from handles import handle_of

from snip_megatron.layers.context import StepContext
from snip_megatron.layers.warm_up import covering, warm_up_gemms, warm_up_linear
from snip_megatron.precision import ALL_BF16, Format

BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR


@pytest.mark.parametrize(
    "options",
    [
        ((FP8, FP4), (FP8, FP4), (FP8, FP4)),
        ((FP8, FP4, TENSOR), (FP8, FP4, TENSOR), (FP8, FP4, TENSOR)),
        ((BF16,), (FP8, FP4), (FP8, FP4)),
        ((FP8,), (FP4,), (BF16,)),
    ],
)
def test_every_pair_of_formats_is_there(options: tuple[tuple[Format, ...], ...]) -> None:
    result = covering((options[0], options[1], options[2]), alike=False)
    for first, second in itertools.combinations(range(3), 2):
        pairs = {(formats[first], formats[second]) for formats in result}
        assert pairs == set(itertools.product(options[first], options[second]))
    assert len(result) <= max(len(a) * len(b) for a, b in itertools.combinations(options, 2)) + 1


def test_linears_with_one_format_have_no_pairs() -> None:
    assert covering(((FP8, FP4),) * 3, alike=True) == [(FP8,) * 3, (FP4,) * 3]


def test_the_linear_itself_is_left_alone() -> None:
    handle = handle_of("decoder.layers.1.mlp.linear_fc1", 48, 32, StepContext(seed=3))
    module = handle.module
    before = module.weight.detach().clone()
    linear = warm_up_linear(handle, 16, whole_x=True)
    warm_up_gemms(linear, [(FP8, FP4, FP8), ALL_BF16, (FP4, FP4, BF16)])
    assert linear.handle.state.backwards == 2  # of the formats that are Megatron's own linear none
    assert (handle.state.backwards, handle.formats, handle.state.weights._key) == (0, ALL_BF16, None)
    assert module.weight.grad is None
    assert torch.equal(module.weight, before)
    assert linear.x.shape == (16, 32)
    assert linear.g.shape == (16, 48)
