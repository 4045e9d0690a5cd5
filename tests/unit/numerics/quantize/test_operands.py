"""Operands in E4M3 and in bf16: the numbers of the reference in both orientations."""

import numpy as np
import pytest
import torch

from snip_megatron.numerics.quantize import fake_quantize
from snip_megatron.numerics.quantize.operands import quantize_exact, quantize_operands

from . import oracle
from .specs import matrix, spec

SHAPES = [(256, 384), (200, 300), (1, 1), (129, 128)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("row", "col"), [("fp8", "fp4"), ("fp4", "fp8"), ("fp8_tensor", "fp8_tensor")])
@pytest.mark.parametrize("weight", [False, True])
def test_both_orientations_hold_the_reference_numbers(shape: tuple[int, int], row: str, col: str, weight: bool) -> None:
    """Their layouts are those that the emulated cuBLAS takes in products/test_hopper.py."""
    x = matrix(*shape)
    operands = quantize_operands(x, spec(row, col, weight=weight))
    assert torch.equal(operands[0].dequantize(), fake_quantize(x, row, block=weight))
    assert torch.equal(operands[1].dequantize(), fake_quantize(x, col, axis=0, block=weight).t())
    for operand, depth in zip(operands, shape[::-1], strict=True):
        assert operand.values.dtype == torch.float8_e4m3fn
        assert not operand.values[:, depth:].float().any()


def test_tensor_scaling_by_a_given_amax() -> None:
    x, amax = matrix(200, 300), torch.tensor(1000.0)
    row, col = quantize_operands(x, spec(None, "fp8_tensor", amax=amax))
    assert row is None
    assert torch.equal(col.dequantize(), fake_quantize(x, "fp8_tensor", tensor_amax=amax).t())


def test_seeds_round_fp4_stochastically_and_leave_fp8_alone() -> None:
    x = matrix(200, 300)
    cols = torch.arange(300) * 7
    row, col = quantize_operands(x, spec("fp4", "fp4", row_seed=3, col_seed=4, first_row=11, cols=cols))
    options = {"rounding": "stochastic", "offset": (11, 0), "cols": cols}
    assert torch.equal(row.dequantize(), fake_quantize(x, "fp4", seed=3, **options))
    assert torch.equal(col.dequantize(), fake_quantize(x, "fp4", axis=0, seed=4, **options).t())
    assert torch.equal(quantize_operands(x, spec("fp8", row_seed=3))[0].dequantize(), fake_quantize(x, "fp8"))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert quantize_operands(x, spec("fp8", "fp4"))[1].values.shape[0] == shape[1]
    assert quantize_operands(x, spec("fp8", "fp4", weight=True))[0].values.shape[0] == shape[0]
    assert quantize_operands(x, spec("fp8_tensor"))[0].scale.tolist() == [1.0]


def test_formats_that_do_not_fit_the_storage_are_left_out() -> None:
    for weight in (False, True):
        for fmt in ("nvfp4", "mxfp8", "bf16"):
            row, col = quantize_operands(matrix(4, 128), spec(fmt, "fp8", weight=weight))
            assert row is None
            assert col is not None


FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp4", "fp8", "fp8_tensor")


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_both_orientations_are_the_oracle_s_numbers(fmt: str, square: bool) -> None:
    """Powers of two and one FP32 factor at a time are exact; nvfp4's two factors may round once more."""
    x = matrix(150, 210)
    row, col = quantize_exact(x, spec(fmt, fmt, weight=square))
    granularity = "block" if square else "tile"
    expected = oracle.quantize_dequantize(x.float().numpy(), fmt, granularity)
    transposed = oracle.quantize_dequantize(x.float().t().contiguous().numpy(), fmt, granularity).T
    for side, numbers in ((row, expected), (col, transposed)):
        assert side.values.dtype is torch.bfloat16
        actual = side.dequantize().numpy()
        if fmt == "nvfp4":
            np.testing.assert_allclose(actual, numbers, rtol=2.0**-23, atol=0)
        else:
            np.testing.assert_array_equal(actual, numbers)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp4"])
def test_seeds_draw_the_reference_bits(fmt: str) -> None:
    x, cols = matrix(70, 96), torch.arange(96) * 3 + 1
    sides = quantize_exact(x, spec(fmt, fmt, row_seed=2**63 + 1, col_seed=5, cols=cols))
    for side, axis, seed in zip(sides, (1, 0), (2**63 + 1, 5), strict=True):
        expected = fake_quantize(x, fmt, axis=axis, rounding="stochastic", seed=seed, cols=cols)
        torch.testing.assert_close(side.dequantize(), expected, rtol=2.0**-23, atol=0)
