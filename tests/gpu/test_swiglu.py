"""SwiGLU fused with quantisation, against Megatron's functions and quantisation after them: equal but for roundings."""

from collections.abc import Iterator

import pytest
import torch

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandPair, OperandSpec
from snip_megatron.precision import Format

FP8, FP4, TENSOR = Format.FP8, Format.FP4, Format.FP8_TENSOR
SHAPES = [(4096, 14336), (1000, 5632), (4, 128)]


@pytest.fixture(scope="module")
def backend(hopper: None) -> Iterator[GemmBackend]:
    yield select_backend("hopper").backend
    torch.compiler.reset()


def tensors(tokens: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    spread = torch.randn(tokens, 1, device="cuda", generator=generator).exp()
    y = torch.randn(tokens, 2 * features, device="cuda", generator=generator) * 2 * spread
    d = torch.randn(tokens, features, device="cuda", generator=generator) * 1e-3 * spread
    return d.bfloat16(), y.bfloat16()


def assert_close(actual: OperandPair, expected: OperandPair) -> None:
    """A number rounded to its other neighbour costs a little. One at a wrong place would cost the whole signal."""
    for side, reference in zip(actual, expected, strict=True):
        assert (side is None) == (reference is None)
        assert side is None or decibel(side.dequantize(), reference.dequantize()) > 60


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("formats", [(FP8, FP8), (FP4, FP4), (FP8, FP4), (FP4, FP8)])
def test_operands_are_those_of_the_unfused_sequence(
    backend: GemmBackend, formats: tuple[Format, Format], shape: tuple[int, int]
) -> None:
    from snip_megatron.megatron.linears import STOCK

    d, y = tensors(*shape)
    torch.compiler.reset()
    assert_close(
        backend.swiglu(y, None, OperandSpec(*formats)), backend.quantize(STOCK.forward(y), OperandSpec(*formats))
    )
    keys = GradientKeys(2**63 + 5, 6, torch.arange(y.shape[1], device="cuda") + 2 * shape[1])
    expected = backend.quantize(STOCK.backward(d, y), OperandSpec(*formats, keys=keys))
    assert_close(backend.swiglu(y, d, OperandSpec(*formats, keys=keys)), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("formats", [(TENSOR, TENSOR), (TENSOR, None), (FP8, TENSOR), (TENSOR, FP4)])
def test_operands_with_one_scale_are_those_of_the_unfused_sequence(
    backend: GemmBackend, formats: tuple[Format, Format | None], shape: tuple[int, int]
) -> None:
    from snip_megatron.megatron.linears import STOCK

    d, y = tensors(*shape)
    torch.compiler.reset()
    x, amax = backend.swiglu(y, None, None)
    expected = STOCK.forward(y)
    assert decibel(x, expected) > 60
    assert amax == x.abs().amax()
    assert_close(
        backend.quantize(x, OperandSpec(*formats, amax=amax)), backend.quantize(expected, OperandSpec(*formats))
    )
    keys = GradientKeys(2**63 + 5, 6, torch.arange(y.shape[1], device="cuda") + 2 * shape[1])
    g, amax = backend.swiglu(y, d, None)
    expected = STOCK.backward(d, y)
    assert decibel(g, expected) > 60
    assert amax == g.abs().amax()
    actual = backend.quantize(g, OperandSpec(*formats, keys=keys, amax=amax))
    assert_close(actual, backend.quantize(expected, OperandSpec(*formats, keys=keys)))
