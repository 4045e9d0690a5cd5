"""A converted ``nn.Linear``: when its weight is quantised again, and what a copy of it is."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from snip_megatron.layers.context import StepContext
from snip_megatron.numerics.products.emulated import EmulatedBackend
from snip_megatron.numerics.quantize.operands import quantize_exact
from snip_megatron.plain.model import convert_linears
from snip_megatron.precision import Format, LinearRow


@pytest.fixture
def linear() -> Any:
    """A linear in fp8 by a backend that keeps the quantised weight and not the weight itself."""
    torch.manual_seed(0)
    module = nn.Linear(128, 128, bias=False)
    context = StepContext(backend=EmulatedBackend(quantize_exact))
    row = LinearRow("decoder.layers.0.mlp.up", 0, 128, 128)
    for handle in convert_linears({row: module}, context):
        handle.state.formats = (Format.FP8,) * 3
    return module


def test_a_write_to_the_data_between_validations_is_seen(linear: Any) -> None:
    """torch does not count it as a change. Averages of weights are put in place so."""
    x = torch.randn(4, 128)
    with torch.no_grad():
        before = linear(x)
        linear.weight.data.mul_(2)
        assert torch.equal(linear(x), 2 * before)


def test_another_weight_at_the_same_address_is_quantised(linear: Any) -> None:
    x, memory = torch.randn(4, 128), linear.weight.detach().clone().numpy()
    before = functional_call(linear, {"weight": torch.from_numpy(memory)}, (x,))
    memory *= 2
    assert torch.equal(functional_call(linear, {"weight": torch.from_numpy(memory)}, (x,)), 2 * before)


@pytest.mark.parametrize("autocast", [False, True])
def test_copies_are_plain_linears(linear: Any, autocast: bool) -> None:
    """They have no part in the steps and maps of the training."""
    x = torch.randn(4, 128)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear(x)
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for duplicate in (copy.deepcopy(linear), torch.load(file, weights_only=False)):
        assert type(duplicate) is nn.Linear
        assert not hasattr(duplicate, "snip")
        assert torch.equal(duplicate(x), nn.functional.linear(x, linear.weight))
    state = torch.get_rng_state()
    averaged = torch.optim.swa_utils.AveragedModel(nn.Sequential(linear))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(averaged(x), nn.functional.linear(x, linear.weight))
