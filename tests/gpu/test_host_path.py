"""Calls of the Hopper backend that C++ replays give what Python gives, and are really replayed."""

import pytest
import torch
from gpu_linear import Linear
from torch import Tensor

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Formats

BF16, FP8, FP4, TENSOR, NVFP4 = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4
FORMATS: list[Formats] = [
    (FP8,) * 3, (FP4,) * 3, (TENSOR,) * 3, (NVFP4,) * 3, (Format.MXFP8,) * 3,
    (FP8, FP4, BF16), (BF16, TENSOR, FP4), (TENSOR, FP8, FP4), (FP4, BF16, FP8),
]  # fmt: skip
SHAPES = [(256, 384, 512), (1000, 1040, 4224), (130, 136, 208), (4, 128, 128)]
MICROBATCHES = 3
pytestmark = pytest.mark.usefixtures("hopper")


@pytest.fixture(scope="module")
def replayed() -> GemmBackend:
    selection = select_backend("hopper")
    assert selection.backend.replayed, selection.reason
    return selection.backend


@pytest.fixture(scope="module")
def python() -> GemmBackend:
    return select_backend("hopper", checks=False).backend


def operands(t: int, n: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x, g = (torch.randn(t, size, device="cuda", generator=generator) for size in (k, n))
    return x.bfloat16().requires_grad_(), (1e-3 * g).bfloat16()


def step(backend: GemmBackend, shape: tuple[int, int, int], formats: Formats) -> list[Tensor]:
    """Y and ∂L/∂X of each microbatch, then main_grad. The weight is quantised in the first one."""
    t, n, k = shape
    linear, result = Linear(backend, n, k, formats), []
    for microbatch in range(MICROBATCHES):
        x, g = operands(t, n, k, microbatch)
        y = linear(x)
        y.backward(g)
        assert x.grad is not None
        result += [y.detach(), x.grad]
    return [*result, linear.weight.main_grad]


def assert_alike(actual: list[Tensor], expected: list[Tensor]) -> None:
    for place, (ours, truth) in enumerate(zip(actual, expected, strict=True)):
        assert decibel(truth.float(), ours) > 60, place
        assert (ours.dtype, ours.stride()) == (truth.dtype, truth.stride()), place


def replays(backend: GemmBackend) -> dict[str, int]:
    return {name: result.replays for name, result in backend.replayed.items()}


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_python(
    replayed: GemmBackend, python: GemmBackend, shape: tuple[int, int, int], formats: Formats
) -> None:
    expected = step(python, shape, formats)
    for _ in range(3):
        assert_alike(step(replayed, shape, formats), expected)
    before = replays(replayed)
    step(replayed, shape, formats)
    taken = {name: count - before[name] for name, count in replays(replayed).items() if count != before[name]}
    if shape in SHAPES[:2]:  # others may be padded or dequantised in torch
        assert taken == {"quantize": 1, "forward": MICROBATCHES, "backward": MICROBATCHES}


def test_swiglu_is_replayed(replayed: GemmBackend, python: GemmBackend) -> None:
    """A replay zeroes the amax again: each call has smaller numbers than the one before."""
    cols, before = torch.arange(512, device="cuda"), replays(replayed)
    for call in range(5):
        y, d = (each.detach() / 4**call for each in (operands(512, 256, 512, 0)[0], operands(512, 256, 512, 1)[1]))
        keys = GradientKeys(2**40 + call, 2**41 + call, cols, paired=True)
        results, probs = [], y.float().abs().sum(1)
        for each in (replayed, python):
            sides = [*each.swiglu(y, None, OperandSpec(FP8, FP4)), *each.swiglu(y, d, OperandSpec(FP8, FP4, keys=keys))]
            sides += each.swiglu(y, None, OperandSpec(FP8, FP8), probs)
            *weighted, of_probs = each.swiglu(y, d, OperandSpec(FP8, FP8), probs)
            sides += weighted
            results.append([*each.swiglu(y, None, None), *each.swiglu(y, d, None), *(o.dequantize() for o in sides)])
            results[-1].append(of_probs)
        assert_alike(*results)
    assert replays(replayed)["swiglu"] >= before["swiglu"] + 18
