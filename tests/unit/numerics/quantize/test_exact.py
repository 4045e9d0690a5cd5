"""Quantised numbers in bf16: those of independent quantisers, exactly."""

import numpy as np
import pytest
import torch

from snip_megatron.numerics.quantize import fake_quantize
from snip_megatron.numerics.quantize.operands import ExactOperand, quantize_exact

from . import oracle
from .specs import matrix, spec

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp4", "fp8", "fp8_tensor")
FOLDED = ("nvfp4", "mxfp4", "mxfp8")


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
        found = side.dequantize().numpy()
        if fmt == "nvfp4":
            np.testing.assert_allclose(found, numbers, rtol=2.0**-23, atol=0)
        else:
            np.testing.assert_array_equal(found, numbers)


@pytest.mark.parametrize("fmt", FOLDED)
def test_values_have_the_formats_own_significant_bits(fmt: str) -> None:
    """nvfp4: 2 + 4 bits, mxfp4: 2, mxfp8: 4. With a factor more, they would fill bf16's 8."""
    row, _ = quantize_exact(matrix(64, 512), spec(fmt))
    mantissas = (row.values[row.values != 0].view(torch.int16).int() & 0x7F) | 0x80
    trailing = (mantissas & -mantissas).log2()
    assert 8 - int(trailing.min()) == {"nvfp4": 6, "mxfp4": 2, "mxfp8": 4}[fmt]
    assert (row.scale is None) == (fmt != "nvfp4")


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp4"])
def test_seeds_draw_the_reference_bits(fmt: str) -> None:
    x, cols = matrix(70, 96), torch.arange(96) * 3 + 1
    sides = quantize_exact(x, spec(fmt, fmt, row_seed=2**63 + 1, col_seed=5, cols=cols))
    for side, axis, seed in zip(sides, (1, 0), (2**63 + 1, 5), strict=True):
        expected = fake_quantize(x, fmt, axis=axis, rounding="stochastic", seed=seed, cols=cols)
        torch.testing.assert_close(side.dequantize(), expected, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_not_a_number_spoils_its_own_tiles_only(fmt: str) -> None:
    x = matrix(256, 256)
    x[5, 200] = float("inf")
    row, col = quantize_exact(x, spec(fmt, fmt))
    spoiled = row.dequantize().isnan()
    assert spoiled[5, 200]
    assert col.dequantize()[5, 200].isnan()
    if fmt != "fp8_tensor":
        assert not spoiled[6:].any()
        assert not col.dequantize()[:, :200].isnan().any()


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_matrices(shape: tuple[int, int], fmt: str) -> None:
    for side in quantize_exact(torch.zeros(shape, dtype=torch.bfloat16), spec(fmt, fmt)):
        assert isinstance(side, ExactOperand)
        assert side.values.shape == shape
