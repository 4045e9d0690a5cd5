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
from snip_megatron.gemm.operands import CachedPair, OperandSpec, UnquantizedOperand, assemble, flatten
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import packed
from snip_megatron.quantization.exact import ExactOperand, quantize_exact

from .emulated_cublaslt import EmulatedLibrary
from .emulated_scaled_mm import scaled_mm
from .test_hopper import keys, operands, run

BF16, FP8, NVFP4, MXFP8 = Format.BF16, Format.FP8, Format.NVFP4, Format.MXFP8
QUANTISED = [fmt for fmt in Format if fmt is not BF16]
MIXED = [(NVFP4, MXFP8, BF16), (BF16, Format.MXFP4, NVFP4), (FP8, NVFP4, Format.FP8_TENSOR)]
EVEN, TAILS = (256, 384, 512), (130, 144, 200)  # T, N, K


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> tuple[CublasLt, EmulatedLibrary]:
    """The binding over an emulation of its functions on host memory."""
    emulated = EmulatedLibrary()
    monkeypatch.setattr("ctypes.CDLL", lambda name: emulated)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return CublasLt(), emulated


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


@pytest.mark.parametrize("fmt", [NVFP4, MXFP8, Format.FP8_TENSOR])
def test_the_library_scales_and_accumulates(fmt: Format, library: tuple[CublasLt, EmulatedLibrary]) -> None:
    """Every product goes through cuBLASLt with the operands as they lie, their factor on the device."""
    x, w, g = operands(128, 144, 208)
    main_grad = torch.ones(144, 208)
    found = run(backend(library[0]), x, w, g, (fmt, fmt, fmt), out=main_grad)
    expected = run(backend(), x, w, g, (fmt, fmt, fmt))
    expected[2] = expected[2] + 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=8e-3, atol=1e-6)
    assert library[1].heuristics == 3
    assert found[2] is main_grad


def test_what_the_library_must_not_see(library: tuple[CublasLt, EmulatedLibrary]) -> None:
    """Rows of the result that are no multiple of 16 bytes, and a main_grad that is no FP32 matrix."""
    x, w, g = operands(20, 6, 10)
    run(backend(library[0]), x, w, g, (NVFP4, NVFP4, NVFP4))
    x, w, g = operands(16, 16, 16)
    for out in (torch.zeros(16, 32)[:, ::2], torch.zeros(16, 16, dtype=torch.bfloat16)):
        library[1].heuristics = 0
        *_, added = run(backend(library[0]), x, w, g, (MXFP8, MXFP8, MXFP8), out=out)
        assert added is out
        assert out.any()


def test_tiled_products_go_to_their_kernel() -> None:
    """fp8 and fp4: one call a product, with the reduction along the columns of both operands."""
    calls = []

    def tiled(a: Tensor, a_scale: Tensor, a_tile: int, b: Tensor, b_scale: Tensor, b_tile: int, out: Tensor,
              *, add: bool) -> None:  # fmt: skip
        calls.append((tuple(a.shape), a_tile, tuple(b.shape), b_tile, add))
        left, right = (
            values.float()
            * scale.repeat_interleave(tile, 0)[: len(values)].repeat_interleave(128, 1)[:, : values.shape[1]]
            for values, scale, tile in ((a, a_scale, a_tile), (b, b_scale, b_tile))
        )
        out.copy_(left @ right.t() + (out.float() if add else 0.0))

    x, w, g = operands(*TAILS)
    tokens, n, k = TAILS
    b = EmulatedBackend(quantize_exact, ExactProducts(None, tiled))
    found = run(b, x, w, g, (FP8, FP8, FP8), out=torch.zeros(n, k))
    expected = run(REFERENCE, x, w, g, (FP8, FP8, FP8))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=8e-3, atol=1e-4)
    assert calls == [
        ((tokens, k), 1, (n, k), 128, False),
        ((tokens, n), 1, (k, n), 128, False),
        ((n, tokens), 1, (k, tokens), 1, True),
    ]


# -- what is read and kept -----------------------------------------------------------------------------------------
def test_one_read_gives_both_orientations() -> None:
    calls = []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[1:])
        return quantize_exact(*arguments, **options)

    x, w, g = operands(*EVEN)
    run(EmulatedBackend(counted, ExactProducts()), x, w, g, (NVFP4, MXFP8, NVFP4))
    assert calls == [(NVFP4, NVFP4), (NVFP4, MXFP8), (MXFP8, NVFP4)]
    calls.clear()
    run(EmulatedBackend(counted, ExactProducts()), x, w, g, (BF16, BF16, BF16))
    assert calls == []


@pytest.mark.parametrize("fmt", [NVFP4, Format.MXFP4, FP8])
def test_saved_operands_come_back(fmt: Format) -> None:
    x, _, _ = operands(*EVEN)
    _, kept = backend().quantize(x, OperandSpec(None, fmt))
    tensors, rest = flatten(kept)
    again = assemble((tensors, rest))
    assert isinstance(again, ExactOperand)
    assert torch.equal(again.dequantize(), kept.dequantize())


def test_x_of_a_bf16_wgrad_is_kept_as_it_is() -> None:
    x, _, _ = operands(*EVEN)
    _, kept = backend().quantize(x, OperandSpec(NVFP4, BF16))
    assert isinstance(kept, UnquantizedOperand)
    assert kept.tensor is x


@pytest.mark.parametrize("formats", [(NVFP4, NVFP4), (NVFP4, BF16), (MXFP8, NVFP4), (FP8, NVFP4)])
@pytest.mark.parametrize("on_hopper", [False, True])
def test_a_kept_weight_is_written_where_it_lies(formats: Any, on_hopper: bool) -> None:
    b: Any = HopperBackend(packed, ScaledProducts(scaled_mm), backend()) if on_hopper else backend()
    first, second = operands(8, 128, 256)[1], operands(9, 128, 256)[1]
    current = torch.zeros(1, dtype=torch.int32)
    sides = b.quantize(first, OperandSpec(*formats, weight=True))
    held = CachedPair(sides, current)
    assert b.quantize(second, OperandSpec(*formats, weight=True), held) is sides
    fresh = b.quantize(second, OperandSpec(*formats, weight=True))
    for side, other in zip(sides, fresh, strict=True):
        if not isinstance(side, UnquantizedOperand):
            assert torch.equal(side.dequantize(), other.dequantize())


def test_hopper_leaves_other_formats_to_it() -> None:
    """Any map of three formats, native or not: no GEMM's numbers depend on the others' formats."""
    b = HopperBackend(packed, ScaledProducts(scaled_mm), backend())
    x, w, g = operands(136, 144, 208)
    formats = (BF16, FP8, NVFP4, MXFP8)
    alone = {fmt: run(b, x, w, g, (fmt, fmt, fmt)) for fmt in formats}
    for fmt in (NVFP4, MXFP8):
        for found, expected in zip(alone[fmt], run(backend(), x, w, g, (fmt, fmt, fmt)), strict=True):
            assert torch.equal(found, expected)
    for chosen in itertools.product(formats, repeat=3):
        for index, found in enumerate(run(b, x, w, g, chosen)):
            assert torch.equal(found, alone[chosen[index]][index]), (chosen, index)


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
