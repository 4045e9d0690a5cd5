"""The backend that multiplies quantised numbers on bf16 tensor cores, on a CPU: numbers, layouts, what is kept."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE
from snip_megatron.gemm.check import wrong_numbers
from snip_megatron.gemm.cublaslt import CublasLt
from snip_megatron.gemm.emulated import EmulatedBackend
from snip_megatron.gemm.exact_products import ExactProducts
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import OperandSpec
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import packed
from snip_megatron.quantization.exact import quantize_exact

from .emulated_scaled_mm import scaled_mm
from .test_hopper import keys, operands, run

BF16, FP8, NVFP4, MXFP8 = Format.BF16, Format.FP8, Format.NVFP4, Format.MXFP8
QUANTISED = [fmt for fmt in Format if fmt is not BF16]
MIXED = [(NVFP4, MXFP8, BF16), (BF16, Format.MXFP4, NVFP4), (FP8, NVFP4, Format.FP8_TENSOR)]
EVEN, TAILS = (256, 384, 512), (130, 144, 200)  # T, N, K


def backend(library: CublasLt | None = None) -> EmulatedBackend:
    return EmulatedBackend(quantize_exact, ExactProducts(library))


def assert_reference(b: Any, shape: tuple[int, int, int], formats: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    x, w, g = operands(*shape, dtype=dtype)
    for found, expected in zip(run(b, x, w, g, formats), run(REFERENCE, x, w, g, formats), strict=True):
        assert found.shape == expected.shape
        assert found.dtype is expected.dtype
        scale = expected.float().abs().amax().clamp_min(1e-20) if expected.numel() else torch.tensor(1.0)
        rtol = max(torch.finfo(found.dtype).eps, 1e-5)
        torch.testing.assert_close(found.float() / scale, expected.float() / scale, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("formats", [*((fmt,) * 3 for fmt in QUANTISED), *MIXED])
@pytest.mark.parametrize("shape", [EVEN, TAILS, (0, 144, 208)])
def test_numbers_are_the_reference_s(shape: tuple[int, int, int], formats: Any) -> None:
    assert_reference(backend(), shape, formats)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", [NVFP4, FP8])
def test_other_dtypes(fmt: Format, dtype: torch.dtype) -> None:
    assert_reference(backend(), TAILS, (fmt, fmt, fmt), dtype)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_error_of_the_gemm_alone(fmt: Format) -> None:
    """At most 1e-6 beside quantisation, against float64 products of the operands."""
    x, w, g = operands(*EVEN)
    b = backend()
    x_row, x_col = b.quantize(x, OperandSpec(fmt, fmt))
    w_row, w_col = b.quantize(w, OperandSpec(fmt, fmt, weight=True))
    g_row, g_col = b.quantize(g, OperandSpec(fmt, fmt, keys=keys(w.shape[0])))
    exact = {name: side.dequantize().double() for name, side in
             {"x": x_row, "xc": x_col, "w": w_row, "wc": w_col, "g": g_row, "gc": g_col}.items()}  # fmt: skip
    products = (
        (b.multiply(Gemm.FPROP, x_row, w_row, torch.float32), exact["x"] @ exact["w"].t()),
        (b.multiply(Gemm.DGRAD, g_row, w_col, torch.float32), exact["g"] @ exact["wc"]),
        (b.multiply(Gemm.WGRAD, g_col, x_col, torch.float32), exact["gc"].t() @ exact["xc"]),
    )
    for found, expected in products:
        assert float((found.double() - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("fmt", [NVFP4, MXFP8, Format.FP8_TENSOR, FP8, BF16])
@pytest.mark.parametrize("tokens", [136, 0])
def test_wgrad_is_added_to_an_fp32_gradient(fmt: Format, tokens: int) -> None:
    x, w, g = operands(tokens, 144, 208)
    main_grad = torch.randn(144, 208)
    before = main_grad.clone()
    *_, alone = run(backend(), x, w, g, (fmt, fmt, fmt))
    *_, added = run(backend(), x, w, g, (fmt, fmt, fmt), out=main_grad)
    assert added is main_grad
    torch.testing.assert_close(main_grad, before + alone, rtol=1e-6, atol=1e-6)
    assert bool(alone.any()) == (tokens > 0)


# -- what is read and kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", itertools.product((BF16, FP8, NVFP4, MXFP8), repeat=3))
def test_hopper_leaves_other_formats_to_it(formats: Any) -> None:
    """Any map of three formats, native or not."""
    assert_reference(HopperBackend(packed, ScaledProducts(scaled_mm), backend()), (136, 144, 208), formats)


# -- the check before training -------------------------------------------------------------------------------------
def test_right_numbers_pass_the_check() -> None:
    assert wrong_numbers(backend(), "cpu", list(Format)) is None


class _Wrong(EmulatedBackend):
    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if gemm is Gemm.WGRAD and out is not None:
            raise RuntimeError("no kernel image\nand more")
        return super().multiply(gemm, a, b, dtype, out) * (1.5 if gemm is Gemm.DGRAD else 1.0)


def test_wrong_numbers_and_failures_do_not() -> None:
    failing = _Wrong(quantize_exact, ExactProducts())
    found = wrong_numbers(failing, "cpu", [BF16, MXFP8])
    assert found == "mxfp8 fails (RuntimeError: no kernel image) on this device"
    failing.multiply = partial(_multiplied, failing)  # type: ignore[method-assign]
    found = wrong_numbers(failing, "cpu", [NVFP4])
    assert found is not None
    assert found.startswith("nvfp4 gives a signal to noise ratio of ")
    assert "in dgrad (at least 12)" in found


def _multiplied(self: EmulatedBackend, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: Any = None) -> Tensor:
    return EmulatedBackend.multiply(self, gemm, a, b, dtype, out) * (1.5 if gemm is Gemm.DGRAD else 1.0)


class _Poisoning(EmulatedBackend):
    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")


def test_a_device_that_fails_ends_the_run() -> None:
    with pytest.raises(SnipError, match=r"the device fails \(CUDA error: an illegal.*--snip-gemm reference$"):
        wrong_numbers(_Poisoning(quantize_exact, ExactProducts()), "cpu", [MXFP8])
