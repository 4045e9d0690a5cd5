"""The Hopper backend on a CPU: cuBLAS emulated with its layouts and refusals, quantisers in torch.

What a GPU computes is tested in tests/gpu; here, that every operand has the layout that cuBLAS takes, and the numbers.
"""

from typing import Any

import pytest
import torch

from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format, Gemm

from .emulated_cublaslt import EmulatedCublasLt
from .products import BACKENDS, EVEN, assert_reference, hopper, operands

BF16, FP8, FP4, TENSOR, NVFP4 = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4
UNIFORM = [(fmt, fmt, fmt) for fmt in (FP8, FP4, TENSOR)]
MIXED = [(FP8, FP4, BF16), (BF16, FP8, FP4), (TENSOR, FP8, FP4), (FP4, TENSOR, FP8), (NVFP4, FP4, TENSOR)]
TAILS = (136, 144, 208)  # whole tiles nowhere, but taken by cuBLAS
REFUSED = [(130, 144, 208), (7, 136, 200), (0, 144, 208), (12, 136, 1), (12, 1, 256)]
backend = BACKENDS["hopper"]


@pytest.mark.parametrize("formats", UNIFORM + MIXED)
@pytest.mark.parametrize("shape", [EVEN, TAILS])
def test_layouts_are_what_cublas_takes_and_numbers_the_reference_s(shape: tuple[int, int, int], formats: Any) -> None:
    assert_reference(backend(), shape, formats)


@pytest.mark.parametrize("formats", UNIFORM[1:])
@pytest.mark.parametrize("shape", REFUSED)
def test_shapes_that_cublas_refuses(shape: tuple[int, int, int], formats: Any) -> None:
    """Rows of A not a multiple of 4 are padded; outputs not a multiple of 16 are multiplied in FP32; T = 0 is empty."""
    assert_reference(backend(), shape, formats)


@pytest.mark.parametrize("name", ["hopper", "emulated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("formats", [MIXED[0], MIXED[2]])
def test_other_dtypes(name: str, dtype: torch.dtype, formats: Any) -> None:
    assert_reference(BACKENDS[name](), TAILS, formats, dtype)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad_is_added_inside_the_gemm_where_the_library_can(adds: bool, dtype: torch.dtype) -> None:
    x, _, g = operands(*EVEN)
    g_col, x_col = (hopper().quantize(each, OperandSpec(None, FP8))[1] for each in (g, x))
    out = torch.ones(EVEN[1], EVEN[2], dtype=dtype)
    expected = out + (g_col.dequantize() @ x_col.dequantize().t())
    assert hopper(library=EmulatedCublasLt(adds=adds)).multiply(Gemm.WGRAD, g_col, x_col, torch.float32, out) is out
    torch.testing.assert_close(out, expected.to(dtype))
