"""When a linear's weight is quantised, and when it must be again."""

from typing import Any

import pytest
import torch
from linears import convert, operands, our_linear, passed, stock_linear

from snip_megatron.layers.context import Override, StepContext
from snip_megatron.layers.registry import DeviceStep, LinearRegistry
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.precision import Format, Formats, LinearRow, PrecisionMap
from tests.unit.numerics.products.products import BACKENDS, hopper

pytestmark = pytest.mark.usefixtures("one_rank")
BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4


class Counting(GemmBackend):
    """The reference, which copies weights as a backend with kernels does, and counts."""

    def __init__(self) -> None:
        self.weights = 0

    def quantize(self, x: torch.Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        self.weights += spec.weight
        return super().quantize(x.detach().clone() if spec.weight else x, spec, cached)


def registered(backend: Any, formats: Formats, k: int = 256, *, device: bool = False) -> tuple[Any, LinearRegistry]:
    linear = stock_linear(128, k, dtype=torch.bfloat16)
    context = StepContext(backend=backend, seed=5, dp_rank=1, dp_size=3)
    handle = convert(linear, context, formats)
    registry = LinearRegistry([LinearRow(handle.name, 0, 1, 1)], context)
    registry.add(handle)
    linear.weight.main_grad = torch.zeros(linear.weight.shape)
    linear.weight.grad_added_to_main_grad = False
    if device:
        registry.device = DeviceStep([handle], [0], torch.device("cpu"))
    return linear, registry


@pytest.fixture
def backend() -> Counting:
    return Counting()


@pytest.fixture
def registry(backend: Counting) -> LinearRegistry:
    return registered(backend, (FP8, FP8, FP8), 128)[1]


@pytest.fixture
def linear(registry: LinearRegistry) -> Any:
    return next(iter(registry)).module


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
    """The distributed optimizer writes through its buffer, which does not change the weight's version."""
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
    """A checkpoint loaded between two steps' forwards changes them, and so does an update in place or a new storage."""
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


TENSOR = Format.FP8_TENSOR
FORMATS: list[Formats] = [(FP8, FP4, FP8), (TENSOR, TENSOR, FP4), (BF16, FP4, BF16),
                          (Format.NVFP4_46, Format.NVFP4, Format.NVFP4_HADAMARD)]  # fmt: skip
HOPPER = hopper()


def train(linear: Any, registry: LinearRegistry, steps: int = 3, microbatches: int = 3) -> list[torch.Tensor]:
    """Everything that the linear gives, and its weight after each step of plain SGD."""
    tensors = []
    for step in range(steps):
        registry.start_step(step)
        linear.weight.main_grad.zero_()
        for microbatch in range(microbatches):
            if registry.device is not None and microbatch == 1:
                registry.device.weights_are_current(0)
            x, _, y = passed(linear, 32, 2, seed=microbatch)
            assert x.grad is not None
            tensors += [y.detach(), x.grad]
        with torch.no_grad():
            linear.weight.data -= (100.0 * linear.weight.main_grad).to(torch.bfloat16)
        registry.end_step()
        tensors += [linear.weight.main_grad.clone(), linear.weight.detach().clone()]
    return tensors


@pytest.mark.parametrize("kind", ["reference", "hopper", "emulated"])
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: "-".join(each.value for each in f))
def test_results_are_those_without_keys_and_weights_on_the_device(formats: Formats, kind: str) -> None:
    results = []
    for device in (False, True):
        backend = BACKENDS[kind]()
        results.append(train(*registered(backend, formats, device=device)))
    assert all(decibel(plain, read) > 60 for plain, read in zip(*results, strict=True))
    assert not torch.equal(results[0][-1], results[0][-1 - len(results[0]) // 3])  # the weight moves


def test_passes_that_are_not_training_leave_keys_and_weights_alone() -> None:
    linear, registry = registered(HOPPER, (FP4, FP4, FP4), device=True)
    train(linear, registry, steps=1)
    sides, values = (
        linear.snip.state.graphed.weight.operands,
        linear.snip.state.graphed.weight.operands[0].values.clone(),
    )
    registry.start_step(1)
    first = [key.clone() for key in linear.snip.state.graphed.next_keys()]
    registry.start_step(1)
    for forced in (Override((FP8, TENSOR, FP4)), Override()):
        registry.context.override = lambda handle, forced=forced: forced
        passed(linear, 32, 2)
    registry.context.override = None
    assert linear.snip.state.graphed.weight.operands is sides
    assert torch.equal(sides[0].values.view(torch.uint8), values.view(torch.uint8))
    for actual, expected in zip(linear.snip.state.graphed.next_keys(), first, strict=True):
        assert torch.equal(actual, expected)


def test_a_validation_sees_the_weights_that_a_step_left() -> None:
    linear, registry = registered(HOPPER, (FP8, FP8, FP8), device=True)
    train(linear, registry, steps=1)
    x, _ = operands(32, 2, 128, 256, torch.bfloat16)
    with torch.no_grad():
        result = linear(x)[0]
    fresh, other = registered(HOPPER, (FP8, FP8, FP8), device=False)
    fresh.weight.data.copy_(linear.weight.data)
    other.start_step(1)
    with torch.no_grad():
        assert torch.equal(result, fresh(x)[0])
