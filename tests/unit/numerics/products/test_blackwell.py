"""The Blackwell backend on a CPU: Transformer Engine emulated with its bytes, layouts and refusals.

What a GPU computes is tested in tests/gpu; here, that every operand is quantised for the GEMM that reads it, how, and
that the products are those of these operands.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from snip_megatron.numerics.products.backend import REFERENCE
from snip_megatron.numerics.products.blackwell_engine import NATIVE, NativeOperand
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.products.operands import UnquantizedOperand
from snip_megatron.numerics.quantize import quantize_dequantize
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format

from .products import BACKENDS, EVEN, keys, operands, run, sides

BF16, FP4, NVFP4, MXFP8 = Format.BF16, Format.FP4, Format.NVFP4, Format.MXFP8
UNIFORM = [(fmt,) * 3 for fmt in NATIVE]
MIXED = [(NVFP4, MXFP8, MXFP8), (MXFP8, NVFP4, BF16), (BF16, MXFP8, NVFP4), (MXFP8, MXFP8, NVFP4), (FP4, NVFP4, MXFP8)]
ODD = [(130, 144, 208), (1, 256, 128), (7, 136, 200), (48, 80, 16)]
LEAST = {BF16: 40.0, MXFP8: 26.0, NVFP4: 12.0, FP4: 12.0}  # dB, of products of normal operands
backend = BACKENDS["blackwell"]


def decoded(side: NativeOperand) -> Tensor:
    """FP32 [rows, cols] of what a GEMM reads."""
    return side.native().decode(side.usage)[: side.shape[0], : side.shape[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [EVEN, ODD[0]], ids=str)
@pytest.mark.parametrize("formats", UNIFORM + MIXED, ids=lambda formats: "-".join(formats))
def test_products_are_those_of_the_exact_operands_within_the_format(
    formats: Any, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, w, g = operands(*shape, dtype=dtype)
    exact = [x.double() @ w.double().t(), g.double() @ w.double(), g.double().t() @ x.double()]
    for product, expected, fmt in zip(run(backend(), x, w, g, formats), exact, formats, strict=True):
        assert product.shape == expected.shape
        assert product.dtype in (dtype, torch.float32)
        assert decibel(expected, product) > LEAST[fmt.base]


def test_nvfp4_operands_are_the_definition_s_numbers() -> None:
    """1×16 tiles along the reduction for X, 16×16 for W: the reference's to the bit, nearest rounding."""
    x, w, g = operands(*EVEN)
    x_row, x_col, w_row, w_col, _, _ = map(decoded, sides(backend(), x, w, g, (NVFP4,) * 3))
    assert torch.equal(x_row, quantize_dequantize(x, "nvfp4", "tile"))
    assert torch.equal(x_col, quantize_dequantize(x.t().contiguous(), "nvfp4", "tile").t())
    assert torch.equal(w_row, quantize_dequantize(w, "nvfp4", "block"))
    assert torch.equal(w_col, w_row)


# -- operands ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(NATIVE))
def test_padding_changes_no_number(rows: int, cols: int, fmt: Format) -> None:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * 71 + cols))
    row, col = backend().quantize(x, OperandSpec(fmt, fmt))
    padded = torch.zeros(96, 96)
    padded[:rows, :cols] = x
    whole_row, whole_col = backend().quantize(padded, OperandSpec(fmt, fmt))
    assert row.shape == (rows, cols)
    assert torch.equal(decoded(row), decoded(whole_row)[:rows, :cols])
    assert torch.equal(decoded(col), decoded(whole_col)[:rows, :cols])


def test_formats_without_a_gemm_here_are_the_reference_s() -> None:
    x, w, g = operands(*EVEN)
    assert all(isinstance(side, UnquantizedOperand) for side in sides(backend(), x, w, g, (FP4,) * 3))
    both = (run(b, x, w, g, (FP4,) * 3) for b in (backend(), REFERENCE))
    assert all(map(torch.equal, *both))


# -- stochastic rounding -------------------------------------------------------------------------------------------
def test_draws_depend_on_the_keys_and_leave_the_generator_alone() -> None:
    _, _, g = operands(*EVEN)
    state = torch.random.get_rng_state()
    first, again = (backend().quantize(g, OperandSpec(NVFP4, NVFP4, keys=keys(384))) for _ in range(2))
    other = backend().quantize(g, OperandSpec(NVFP4, NVFP4, keys=keys(384, seed=18)))
    assert torch.equal(torch.random.get_rng_state(), state)
    for side, same, different in zip(first, again, other, strict=True):
        assert torch.equal(decoded(side), decoded(same))
        assert not torch.equal(decoded(side), decoded(different))
    alone, _ = backend().quantize(g, OperandSpec(NVFP4, MXFP8, keys=keys(384)))
    _, column = backend().quantize(g, OperandSpec(MXFP8, NVFP4, keys=keys(384)))
    assert not torch.equal(decoded(alone), decoded(column))


def test_rounding_of_gradients_is_unbiased_and_of_the_rest_nearest() -> None:
    x, _, g = operands(128, 128, 256)
    draws = torch.stack(
        [decoded(backend().quantize(g, OperandSpec(NVFP4, None, keys=keys(128, seed=i)))[0]) for i in range(64)]
    )
    step = float((draws.amax(0) - draws.amin(0)).max())
    assert float((draws.mean(0) - g).mean().abs()) < 4 * step / (64 * g.numel()) ** 0.5
    assert decibel(g, draws.mean(0)) > decibel(g, draws[0]) + 12
    for weight in (False, True):
        first, second = (backend().quantize(x, OperandSpec(NVFP4, None, weight=weight))[0] for _ in range(2))
        assert torch.equal(decoded(first), decoded(second))
