"""Transformer Engine's GEMMs one by one, over quantizers and a ``general_gemm`` emulated by the reference."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.numerics.products.check import wrong_numbers
from snip_megatron.numerics.products.transformer_engine import TransformerEngineGemms
from snip_megatron.numerics.quantize import quantize_dequantize
from snip_megatron.precision import Format

from .products import EVEN, operands, run, sides

FORMATS = (Format.FP8_TENSOR, Format.FP8, Format.MXFP8, Format.NVFP4)
_draws = iter(range(10**6))


class Quantizer:
    """Keeps the numbers that a usage dequantises to; a gradient in NVFP4 is rounded stochastically."""

    def __init__(self, fmt: str, tensor: str) -> None:
        self.fmt, self.tensor = fmt, tensor

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.usages = rowwise, columnwise

    def __call__(self, x: Tensor) -> Any:
        rounding = "stochastic" if (self.fmt, self.tensor) == ("nvfp4", "grad_output") else "nearest"

        def made(x: Tensor) -> Tensor:
            granularity = "block" if self.tensor == "weight" else "tile"
            seed = next(_draws) if rounding == "stochastic" else None
            return quantize_dequantize(x, self.fmt, granularity, rounding=rounding, seed=seed)

        row, col = self.usages
        return SimpleNamespace(row=made(x) if row else None, col=made(x.t()).t() if col else None)


def general_gemm(
    a: Any, b: Any, *, layout: str, out_dtype: Any, out: Any, accumulate: bool, grad: bool, use_split_accumulator: bool
) -> tuple[Any, ...]:
    """B·A column-major, i.e. op(B)·op(A) row-major; a GEMM reads the usage whose tiles run along its reduction."""
    a_t, b_t = layout[0] == "T", layout[1] == "T"
    a, b = (
        (x if isinstance(x, Tensor) else (x.row if rowwise else x.col)).float()
        for x, rowwise in ((a, a_t), (b, not b_t))
    )
    product = (b.t() if b_t else b) @ (a.t() if a_t else a)
    assert grad == (layout != "TN")
    assert accumulate == (out is not None)
    assert use_split_accumulator == grad
    if out is None:
        return product.to(out_dtype), None, None, None
    return out.add_(product.to(out_dtype)), None, None, None


def gemms() -> TransformerEngineGemms:
    return TransformerEngineGemms(Quantizer, general_gemm)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_check_before_training_passes_correct_gemms(fmt: Format) -> None:
    assert wrong_numbers(gemms(), "cpu", [fmt]) is None


def test_the_check_finds_a_gradient_rounded_to_nearest() -> None:
    nearest = TransformerEngineGemms(lambda fmt, tensor: Quantizer(fmt, "input"), general_gemm)
    assert "nvfp4 rounds gradients with a bias" in (wrong_numbers(nearest, "cpu", [Format.NVFP4]) or "")


def test_each_gemm_has_its_own_format() -> None:
    x, w, g = operands(*EVEN)
    formats = Format.FP8, Format.BF16, Format.MXFP8
    grad = torch.ones(EVEN[1], EVEN[2])
    y, d, grad_weight = run(gemms(), x, w, g, formats, grad)
    assert grad_weight is grad
    assert (y.dtype, d.dtype) == (torch.bfloat16, torch.bfloat16)
    exact = x.float() @ w.float().t(), g.float() @ w.float(), g.float().t() @ x.float() + 1
    for found, expected, bound in zip((y, d, grad), exact, (0.06, 0.01, 0.06), strict=True):
        assert (found.float() - expected).norm() < bound * expected.norm()
    x_row, x_col, _, w_col, g_row, g_col = sides(gemms(), x, w, g, formats)
    assert w_col is w  # unquantised
    assert g_row is g
    assert (x_row.col, x_col.row, g_col.row) == (None, None, None)  # each is made for one GEMM
    x_row, x_col, *_ = sides(gemms(), x, w, g, (Format.FP8,) * 3)
    assert x_row is x_col  # one call for both
