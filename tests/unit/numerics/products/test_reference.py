"""The reference GEMMs against float64: exact on what they quantise."""

from typing import Any

import pytest
import torch

from snip_megatron.numerics.products.backend import REFERENCE
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.quantize import fake_quantize
from snip_megatron.numerics.quantize.formats import STOCHASTIC
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.numerics.quantize.reference import ROTATED, rotate
from snip_megatron.precision import Format, Gemm

from .products import QUANTISED


def fprop(x: torch.Tensor, w: torch.Tensor, fmt: Format) -> torch.Tensor:
    sides = (REFERENCE.quantize(t, OperandSpec(fmt, None, weight=t is w))[0] for t in (x, w))
    return REFERENCE.multiply(Gemm.FPROP, *sides, x.dtype)


def dgrad(g: torch.Tensor, w: torch.Tensor, fmt: Format, **keys: Any) -> torch.Tensor:
    row, _ = REFERENCE.quantize(g, OperandSpec(fmt, None, keys=gradient_keys(**keys)))
    _, col = REFERENCE.quantize(w, OperandSpec(None, fmt, weight=True))
    return REFERENCE.multiply(Gemm.DGRAD, row, col, g.dtype)


def wgrad(g: torch.Tensor, x: torch.Tensor, fmt: Format, **keys: Any) -> torch.Tensor:
    _, of_g = REFERENCE.quantize(g, OperandSpec(None, fmt, keys=gradient_keys(**keys)))
    _, of_x = REFERENCE.quantize(x, OperandSpec(None, fmt))
    return REFERENCE.multiply(Gemm.WGRAD, of_g, of_x, torch.float32)


def gradient_keys(seed: int = 0, first_row: int = 0) -> GradientKeys:
    return GradientKeys(seed, seed, None, first_row)


every_format = pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.value)


def operands(tokens: int = 256) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """X [T, 384], W [512, 384], G [T, 512], FP32."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((tokens, 384), (512, 384), (tokens, 512)))
    return x, w, g * 1e-3


@every_format
@pytest.mark.parametrize("tokens", [256, 130, 1])
def test_products_are_those_of_the_quantised_operands(fmt: Format, tokens: int) -> None:
    x, w, g = operands(tokens=tokens)
    options = {"rounding": "stochastic" if fmt in STOCHASTIC else "nearest", "seed": 5}
    exact = fake_quantize(x, fmt).double() @ fake_quantize(w, fmt, block=True).double().t()
    assert decibel(exact, fprop(x, w, fmt)) > 120
    actual = wgrad(g, x, fmt, seed=5)
    weight = fake_quantize(w, fmt, axis=0, block=True).double()
    assert decibel(fake_quantize(g, fmt, **options).double() @ weight, dgrad(g, w, fmt, seed=5)) > 120
    g, x = (rotate(t) if fmt in ROTATED else t for t in (g, x))
    quantised = fake_quantize(g, fmt, axis=0, **options).double()
    expected = quantised.t() @ fake_quantize(x, fmt, axis=0).double()
    assert decibel(expected, actual) > 120
