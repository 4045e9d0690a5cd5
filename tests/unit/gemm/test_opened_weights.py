"""A weight that was gathered quantised gives the operands of the weight itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from snip_megatron.gemm.backend import REFERENCE
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import GradientKeys
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format
from snip_megatron.quantization import packed
from snip_megatron.quantization.packed import Operand
from snip_megatron.quantization.ranges import FORMATS, QuantizedWeight
from snip_megatron.quantization.reference import quantize

from .emulated_scaled_mm import scaled_mm

PAIRS = list(itertools.product(FORMATS, repeat=2))


def weight(shape: tuple[int, int]) -> torch.Tensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    w[:, 3] = -1e-9  # rounds to a negative zero
    return w


def gathered(w: torch.Tensor, *formats: Format) -> dict[Format, QuantizedWeight]:
    made = {fmt: quantize(w, fmt, block=True) for fmt in formats}
    return {fmt: QuantizedWeight(q.values.to(torch.float8_e4m3fn), q.scale) for fmt, q in made.items()}


@pytest.mark.parametrize(("fprop", "dgrad"), PAIRS)
@pytest.mark.parametrize("shape", [(256, 384), (144, 208), (64, 96)])
def test_operands_of_hopper(fprop: Format, dgrad: Format, shape: tuple[int, int]) -> None:
    """In every byte, padding included."""
    backend, w = HopperBackend(packed, ScaledProducts(scaled_mm)), weight(shape)
    found = backend.open_weight(gathered(w, fprop, dgrad), fprop, dgrad)
    expected = backend.quantize_weight(w, fprop, dgrad)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Operand)
        assert isinstance(other, Operand)
        assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(one.scale, other.scale)
        assert one.values.stride() == other.values.stride()
        assert one.scale.stride() == other.scale.stride()
        assert (one.scaling, one.depth) == (other.scaling, other.depth)


@pytest.mark.parametrize(("fprop", "dgrad"), PAIRS)
def test_products_of_the_reference(fprop: Format, dgrad: Format) -> None:
    w = weight((144, 208))
    x, g = torch.randn(40, 208).bfloat16(), torch.randn(40, 144).bfloat16()
    found = REFERENCE.open_weight(gathered(w, fprop, dgrad), fprop, dgrad)
    expected = REFERENCE.quantize_weight(w, fprop, dgrad)
    of_x = REFERENCE.quantize_input(x, fprop, None)[0]
    of_g = REFERENCE.quantize_gradient(g, dgrad, None, GradientKeys(7, 8, torch.arange(144)))[0]
    for of_other, one, other in ((of_x, found[0], expected[0]), (of_g, found[1], expected[1])):
        product = REFERENCE.fprop if of_other is of_x else REFERENCE.dgrad
        assert torch.equal(product(of_other, one, dtype=torch.float32), product(of_other, other, dtype=torch.float32))
