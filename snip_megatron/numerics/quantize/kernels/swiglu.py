# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The functions of ``../swiglu.py`` as Triton kernels, which quantise the result in the program that computes it, or
store it as bf16 and find its amax. Numbers are FP32 throughout, and rounded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels.device import (
    EDGE,
    amax_pairs,
    load_pairs,
    pair_values,
    raise_amax,
    store_rows,
)
from snip_megatron.numerics.quantize.kernels.launch import TypedTensor, launch
from snip_megatron.numerics.quantize.kernels.programs import quantize_both
from snip_megatron.numerics.quantize.kernels.quantize import (
    element_bits,
    empty_tiles,
    has_hopper_instructions,
    output_arguments,
    reads_pairs,
    rounding_arguments,
    row_stride,
    tile_count,
)
from snip_megatron.numerics.quantize.operands import OperandPair, OperandSpec
from snip_megatron.precision import Format


# -- device code -----------------------------------------------------------------------------------------------------
@triton.jit
def _bf16_bits(x):
    """Return FP32 x rounded to bf16, to nearest even, in the upper half of int32; the lower half has no meaning."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)


@triton.jit
def rounded_words(lo, hi, HARDWARE: tl.constexpr):
    """Round FP32 pairs to bf16, and return them as the int32 words that a load of a bf16 matrix gives."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((_bf16_bits(lo) >> 16) & 0xFFFF) | (_bf16_bits(hi) & -65536)


@triton.jit
def load_numbers(ptr, stride, M, width, m, k):
    """Return FP32 of the even and of the odd columns of part (m, k) of a bf16 matrix, [128, 64] each."""
    return pair_values(load_pairs(ptr, stride, M, width, m, k, False))


@triton.jit
def _sigmoid(x, HARDWARE: tl.constexpr):
    """Return 1 / (1 + exp(−x)) with the bits of ``tl.sigmoid``, by the reciprocal of a quarter of the divisor."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;"
            " fma.rn.f32 e, e, 0f3E800000, 0f3E800000; rcp.approx.ftz.f32 e, e; mul.f32 $0, e, 0f3E800000; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.sigmoid(x)


@triton.jit
def _silu(x, HARDWARE: tl.constexpr):
    return x * _sigmoid(x, HARDWARE) if HARDWARE else x / (1.0 + tl.exp(-x))


@triton.jit
def _swiglu(gate, up, HARDWARE: tl.constexpr):
    return _silu(gate, HARDWARE) * up


@triton.jit
def _gate_gradient(d, gate, up, HARDWARE: tl.constexpr):
    sigmoid = _sigmoid(gate, HARDWARE)
    return d * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up


@triton.jit
def _probs(probs_ptr, M, m):
    """Return the probabilities [128, 1] of the rows of part m."""
    rows = m * EDGE + tl.arange(0, EDGE)
    return tl.load(probs_ptr + rows, mask=rows < M, other=0.0)[:, None]


@triton.jit
def _result(y_ptr, probs_ptr, y_stride, M, K, m, k, PROBS: tl.constexpr, HARDWARE: tl.constexpr):
    """Return part (m, k) of SwiGLU [M, K] of y [M, 2K] as int32 [128, 64] of bf16 pairs, times ``PROBS``."""
    gate_lo, gate_hi = load_numbers(y_ptr, y_stride, M, K // 2, m, k)
    up_lo, up_hi = load_numbers(y_ptr + K // 2, y_stride, M, K // 2, m, k)
    lo, hi = _swiglu(gate_lo, up_lo, HARDWARE), _swiglu(gate_hi, up_hi, HARDWARE)
    if PROBS:
        probs = _probs(probs_ptr, M, m)
        lo, hi = lo * probs, hi * probs
    return rounded_words(lo, hi, HARDWARE)


@triton.jit
def _gradient(
    d_ptr, y_ptr, probs_ptr, d_stride, y_stride, M, K, m, k, half, PROBS: tl.constexpr, HARDWARE: tl.constexpr
):
    """Return part (m, k) of a half of the gradient [M, 2K], of the gates (0) or the ups (1), as bf16 pairs."""
    d_lo, d_hi = load_numbers(d_ptr, d_stride, M, K // 2, m, k)
    if PROBS:
        probs = _probs(probs_ptr, M, m)
        d_lo, d_hi = d_lo * probs, d_hi * probs
    gate_lo, gate_hi = load_numbers(y_ptr, y_stride, M, K // 2, m, k)
    if half == 0:
        up_lo, up_hi = load_numbers(y_ptr + K // 2, y_stride, M, K // 2, m, k)
        lo, hi = _gate_gradient(d_lo, gate_lo, up_lo, HARDWARE), _gate_gradient(d_hi, gate_hi, up_hi, HARDWARE)
        words = rounded_words(lo, hi, HARDWARE)
    else:
        words = rounded_words(d_lo * _silu(gate_lo, HARDWARE), d_hi * _silu(gate_hi, HARDWARE), HARDWARE)
    return words


@triton.jit
def _probs_gradient(d_ptr, y_ptr, d_stride, y_stride, M, K, m, k, HARDWARE: tl.constexpr):
    """Return Σ d·SwiGLU [128] over the columns of part (m, k)."""
    d_lo, d_hi = load_numbers(d_ptr, d_stride, M, K // 2, m, k)
    gate_lo, gate_hi = load_numbers(y_ptr, y_stride, M, K // 2, m, k)
    up_lo, up_hi = load_numbers(y_ptr + K // 2, y_stride, M, K // 2, m, k)
    return tl.sum(d_lo * _swiglu(gate_lo, up_lo, HARDWARE) + d_hi * _swiglu(gate_hi, up_hi, HARDWARE), axis=1)


@triton.jit
def swiglu_kernel(
    y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, probs_ptr, x_ptr, M, K, col_stride,
    y_stride: tl.constexpr, row_stride: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    PROBS: tl.constexpr, PLAIN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise SwiGLU [M, K] of y [M, 2K], gates first. ``y_stride`` and ``row_stride`` count pairs.

    K is a multiple of 128. ``ROW`` and ``COL`` are the bits of the formats of the two operands, or 0 for none. With
    ``PROBS`` each row is multiplied by its probability. With ``PLAIN`` the result is stored in bf16 too.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    words = _result(y_ptr, probs_ptr, y_stride, M, K, m, k, PROBS, HARDWARE)
    if PLAIN:
        store_rows(x_ptr, words, m, k, K // 2, m * EDGE + tl.arange(0, EDGE) < M)
    quantize_both(
        words, y_ptr, 0, 0, y_ptr, y_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
        M, K, m, k, row_stride, col_stride, 0, 0, 0, 0, 0,
        ROW, COL, False, False, False, True, False, HARDWARE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_word_0", "row_word_1", "col_word_0", "col_word_1"])
def swiglu_gradient_kernel(
    d_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, cols_ptr, row_key_ptr, col_key_ptr,
    probs_ptr, probs_gradient_ptr, g_ptr,
    M, K, col_stride, row_word_0, row_word_1, col_word_0, col_word_1,
    d_stride: tl.constexpr, y_stride: tl.constexpr, row_stride: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_RANDOM: tl.constexpr, COL_RANDOM: tl.constexpr, LOADED: tl.constexpr,
    PAIRED: tl.constexpr, PROBS: tl.constexpr, PLAIN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise the gradient [M, 2K] of SwiGLU of y [M, 2K], from the gradient d [M, K] of its result.

    Neighbouring programs compute the same part of both halves, so that the second program reads from cache. With
    ``PROBS`` rows have probabilities. Terms of their gradients are stored to ``probs_gradient`` [K / 128, M].
    """
    k, m, half = tl.program_id(0) // 2, tl.program_id(1), tl.program_id(0) % 2
    words = _gradient(d_ptr, y_ptr, probs_ptr, d_stride, y_stride, M, K, m, k, half, PROBS, HARDWARE)
    rows = m * EDGE + tl.arange(0, EDGE)
    if PROBS:  # noqa: SIM102 - decided when compiled, and when run
        if half == 0:
            sums = _probs_gradient(d_ptr, y_ptr, d_stride, y_stride, M, K, m, k, HARDWARE)
            tl.store(probs_gradient_ptr + k.to(tl.int64) * M + rows, sums, mask=rows < M)
    if PLAIN:
        store_rows(g_ptr, words, m, half * (K // EDGE) + k, K, rows < M)
    quantize_both(
        words, y_ptr, 0, 0, cols_ptr, row_key_ptr, col_key_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
        M, 2 * K, m, half * (K // EDGE) + k, row_stride, col_stride,
        0, row_word_0, row_word_1, col_word_0, col_word_1,
        ROW, COL, ROW_RANDOM, COL_RANDOM, LOADED, PAIRED, False, HARDWARE,
    )  # fmt: skip


@triton.jit
def _largest(words, HARDWARE: tl.constexpr):
    """Return the FP32 bits of the amax of bf16 pairs."""
    lo, hi = amax_pairs(words, False, HARDWARE)
    return tl.max(tl.maximum(lo, hi), axis=0)


@triton.jit
def swiglu_amax_kernel(y_ptr, x_ptr, amax_ptr, M, K, y_stride: tl.constexpr, HARDWARE: tl.constexpr):
    """Store SwiGLU [M, K] of y [M, 2K] as bf16 pairs, and its amax to ``amax_ptr``, which holds zero before."""
    k, m = tl.program_id(0), tl.program_id(1)
    words = _result(y_ptr, y_ptr, y_stride, M, K, m, k, False, HARDWARE)
    store_rows(x_ptr, words, m, k, K // 2, m * EDGE + tl.arange(0, EDGE) < M)
    raise_amax(amax_ptr, _largest(words, HARDWARE))


@triton.jit
def swiglu_gradient_amax_kernel(
    d_ptr, y_ptr, g_ptr, amax_ptr, M, K, d_stride: tl.constexpr, y_stride: tl.constexpr, HARDWARE: tl.constexpr
):  # fmt: skip
    """Store the gradient [M, 2K] of SwiGLU as bf16 pairs, and its amax to ``amax_ptr``, which holds zero before.

    A program computes both halves. The compiler merges their loads of d and of the gates (tested).
    """
    k, m = tl.program_id(0), tl.program_id(1)
    gates = _gradient(d_ptr, y_ptr, y_ptr, d_stride, y_stride, M, K, m, k, 0, False, HARDWARE)
    ups = _gradient(d_ptr, y_ptr, y_ptr, d_stride, y_stride, M, K, m, k, 1, False, HARDWARE)
    row_mask = m * EDGE + tl.arange(0, EDGE) < M
    store_rows(g_ptr, gates, m, k, K, row_mask)
    store_rows(g_ptr, ups, m, K // EDGE + k, K, row_mask)
    raise_amax(amax_ptr, tl.maximum(_largest(gates, HARDWARE), _largest(ups, HARDWARE)))


# -- launches --------------------------------------------------------------------------------------------------------
LAUNCH: dict[str, dict[str, int]] = {
    "swiglu": {"num_warps": 8, "maxnreg": 80},
    "gradient": {"num_warps": 8, "maxnreg": 128},  # holds parts of three matrices
    "gradient of experts": {"num_warps": 16, "maxnreg": 128},  # swiglu_experts_h100_2026-11-26.txt: 17 % faster
    "swiglu, amax": {"num_warps": 16, "maxnreg": 40},
    "gradient, amax": {"num_warps": 8, "maxnreg": 128},
}
"""Launch options: the fewest registers with which the assembler spills nothing, or (gradient) little."""
_WORD = torch.int32


def fits(y: Tensor) -> bool:
    """Return whether the kernels take y [M, 2K]: bf16 that is read as words of two numbers, and whole tiles along K."""
    whole = y.stride(1) == 1 and y.shape[1] % (2 * TILE) == 0
    return y.dtype is torch.bfloat16 and whole and reads_pairs(y)


def quantize_swiglu(y: Tensor, spec: OperandSpec, probs: Tensor | None = None) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.swiglu.quantize_swiglu`. Requires :func:`fits`."""
    M, K = y.shape[0], y.shape[1] // 2
    row, col = empty_tiles(y, spec.rowwise, M, K), empty_tiles(y, spec.columnwise, K, M)
    plain = y.new_empty(M, K) if Format.BF16 in spec.formats else None
    if y.numel():
        launch(
            swiglu_kernel, (tile_count(K), tile_count(M)),
            [(y, _WORD), *output_arguments(row, col, y), y if probs is None else probs, _pairs(plain, y)],
            (M, K, row_stride(col)), (),
            {
                "y_stride": y.stride(0) // 2, "row_stride": row_stride(row) // 2, **element_bits(spec),
                "PROBS": probs is not None, "PLAIN": plain is not None, "HARDWARE": has_hopper_instructions(y),
            },
            LAUNCH["swiglu"],
        )  # fmt: skip
    return plain if spec.rowwise is Format.BF16 else row, plain if spec.columnwise is Format.BF16 else col


def quantize_swiglu_gradient(
    d: Tensor, y: Tensor, spec: OperandSpec, probs: Tensor | None = None
) -> tuple[Any, Any, Tensor | None]:
    """See :func:`snip_megatron.numerics.quantize.swiglu.quantize_swiglu_gradient`. Requires :func:`fits`."""
    M, K = d.shape
    row, col = empty_tiles(y, spec.rowwise, M, 2 * K), empty_tiles(y, spec.columnwise, 2 * K, M)
    plain = y.new_empty(M, 2 * K) if Format.BF16 in spec.formats else None
    probs_gradient = None if probs is None else torch.empty(tile_count(K), M, dtype=torch.float32, device=y.device)
    if y.numel():
        keys, words, random = rounding_arguments(spec, 2 * K, y)
        launch(
            swiglu_gradient_kernel, (2 * tile_count(K), tile_count(M)),
            [
                (d, _WORD), (y, _WORD), *output_arguments(row, col, y), *keys, y if probs is None else probs,
                y if probs_gradient is None else probs_gradient, _pairs(plain, y),
            ],
            (M, K, row_stride(col)), words,
            {
                "d_stride": d.stride(0) // 2, "y_stride": y.stride(0) // 2, "row_stride": row_stride(row) // 2,
                **element_bits(spec), **random, "PROBS": probs is not None, "PLAIN": plain is not None,
                "HARDWARE": has_hopper_instructions(y),
            },
            LAUNCH["gradient" if probs is None else "gradient of experts"],
        )  # fmt: skip
    row_or_plain, col_or_plain = (
        plain if fmt is Format.BF16 else operand for fmt, operand in zip(spec.formats, (row, col), strict=True)
    )
    return row_or_plain, col_or_plain, None if probs_gradient is None else probs_gradient.sum(0)


def _pairs(matrix: Tensor | None, unused: Tensor) -> Tensor | TypedTensor:
    """Return a bf16 matrix as words of two numbers, or ``unused`` if there is none."""
    return unused if matrix is None else (matrix, _WORD)


def swiglu_with_amax(y: Tensor, d: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :func:`snip_megatron.numerics.quantize.swiglu.swiglu_with_amax`. Requires :func:`fits`."""
    M, K = y.shape[0], y.shape[1] // 2
    result, amax = y.new_empty(M, K if d is None else 2 * K), torch.zeros((), dtype=torch.int32, device=y.device)
    if y.numel():
        kernel, kind = (swiglu_amax_kernel, "swiglu") if d is None else (swiglu_gradient_amax_kernel, "gradient")
        gradient, stride = ([], {}) if d is None else ([(d, _WORD)], {"d_stride": d.stride(0) // 2})
        launch(
            kernel, (tile_count(K), tile_count(M)), [*gradient, (y, _WORD), (result, _WORD), amax], (M, K), (),
            {**stride, "y_stride": y.stride(0) // 2, "HARDWARE": has_hopper_instructions(y)}, LAUNCH[f"{kind}, amax"],
        )  # fmt: skip
    return result, amax.view(torch.float32)
