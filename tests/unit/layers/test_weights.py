"""When a linear's weight is quantised, and when it must be again."""

from typing import Any

import pytest
import torch
from linears import convert, operands, our_linear, passed, stock_linear

from snip_megatron.layers.context import StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.precision import Format, LinearRow, PrecisionMap

pytestmark = pytest.mark.usefixtures("one_rank")
BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4


class Counting(GemmBackend):
    """The reference, which copies weights as a backend with kernels does, and counts."""

    def __init__(self) -> None:
        self.weights = 0

    def quantize(self, x: torch.Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        self.weights += spec.weight
        return super().quantize(x.detach().clone() if spec.weight else x, spec, cached)


@pytest.fixture
def linear() -> Any:
    return stock_linear(128, 128, dtype=torch.bfloat16)


@pytest.fixture
def backend() -> Counting:
    return Counting()


@pytest.fixture
def registry(linear: Any, backend: Counting) -> LinearRegistry:
    context = StepContext(backend=backend)
    handle = convert(linear, context, (FP8, FP8, FP8))
    registry = LinearRegistry([LinearRow(name, 0, 1, 1) for name in [handle.name]], context)
    registry.add(handle)
    return registry


def step(linear: Any, microbatches: int = 3) -> torch.Tensor:
    for microbatch in range(microbatches):
        _, _, y = passed(linear, 32, 1, seed=microbatch)
    return y.detach()


def test_a_map_quantises_anew(linear: Any, registry: LinearRegistry, backend: Counting) -> None:
    step(linear)
    before = step(linear)
    assert backend.weights == 1
    registry.adopt(PrecisionMap.uniform(registry.names, FP4))
    assert not torch.equal(step(linear), before)
    assert backend.weights == 2


def test_a_validation_after_a_step_sees_new_weights(linear: Any, registry: LinearRegistry, backend: Counting) -> None:
    """The distributed optimizer writes through its buffer: the weight's version does not tell."""
    registry.start_step(0)
    step(linear)
    version = linear.weight._version
    linear.weight.data.mul_(2)
    assert linear.weight._version == version
    registry.end_step()
    x, _ = operands(32, 1, 128, 128, torch.bfloat16)
    fresh = our_linear(StepContext(), (FP8, FP8, FP8), 128, 128, dtype=torch.bfloat16)
    fresh.weight.data.copy_(linear.weight.data)
    with torch.no_grad():
        assert torch.equal(linear(x)[0], fresh(x)[0])
    assert backend.weights == 2


@pytest.mark.parametrize("how", ["load", "in_place", "replaced"])
def test_weights_that_change_unannounced(linear: Any, registry: LinearRegistry, backend: Counting, how: str) -> None:
    """Loading a checkpoint between two steps' forwards, an update in place, a new storage."""
    before = step(linear)
    with torch.no_grad():
        if how == "load":
            linear.load_state_dict({"weight": linear.weight * 2}, strict=False)
        elif how == "in_place":
            linear.weight.mul_(2)
        else:
            linear.weight.data = linear.weight.data * 2
    after = step(linear)
    assert backend.weights == 2
    torch.testing.assert_close(after, before * 2)
