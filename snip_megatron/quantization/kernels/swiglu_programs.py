# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that computes SwiGLU or its gradient. Kernels quantise the result, which then never lies in memory as
bf16, or store it as bf16 and find its amax.

The expressions are those that torch 2.11 compiles Megatron's functions to: FP32 throughout, one rounding to bf16, in
one function an exponential of libdevice and in the other Triton's. Another expression of the same value would give
other bits. Megatron's own functions need not be compiled to these, so that ``layers/swiglu.py`` compares them first.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from snip_megatron.quantization.kernels.pairs import EDGE, amax_pairs, store_rows
from snip_megatron.quantization.kernels.results import load_numbers, rounded_words, store_both


@triton.jit
def _silu(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        exponential = libdevice.exp(-x)
    else:  # the interpreter has no libdevice
        exponential = tl.exp(-x)
    return x / (1.0 + exponential)


@triton.jit
def _swiglu(gate, up, HARDWARE: tl.constexpr):
    return _silu(gate, HARDWARE) * up


@triton.jit
def _gate_gradient(d, gate, up):
    return d * tl.sigmoid(gate) * (1.0 + gate * (1.0 - tl.sigmoid(gate))) * up


@triton.jit
def _result(y_ptr, y_stride, M, K, m, k, HARDWARE: tl.constexpr):
    """Return part (m, k) of SwiGLU [M, K] of y [M, 2K] as int32 [128, 64] of bf16 pairs."""
    gate_lo, gate_hi = load_numbers(y_ptr, y_stride, M, K // 2, m, k)
    up_lo, up_hi = load_numbers(y_ptr + K // 2, y_stride, M, K // 2, m, k)
    return rounded_words(_swiglu(gate_lo, up_lo, HARDWARE), _swiglu(gate_hi, up_hi, HARDWARE), HARDWARE)


@triton.jit
def _gradient(d_ptr, y_ptr, d_stride, y_stride, M, K, m, k, half, HARDWARE: tl.constexpr):
    """Return part (m, k) of a half of the gradient [M, 2K], of the gates (0) or the others (1), as bf16 pairs."""
    d_lo, d_hi = load_numbers(d_ptr, d_stride, M, K // 2, m, k)
    gate_lo, gate_hi = load_numbers(y_ptr, y_stride, M, K // 2, m, k)
    if half == 0:
        up_lo, up_hi = load_numbers(y_ptr + K // 2, y_stride, M, K // 2, m, k)
        words = rounded_words(_gate_gradient(d_lo, gate_lo, up_lo), _gate_gradient(d_hi, gate_hi, up_hi), HARDWARE)
    else:
        words = rounded_words(d_lo * _silu(gate_lo, HARDWARE), d_hi * _silu(gate_hi, HARDWARE), HARDWARE)
    return words


@triton.jit
def swiglu_kernel(
    y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, M, K, col_stride,
    y_stride: tl.constexpr, row_stride: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise SwiGLU [M, K] of y [M, 2K], gates first. ``y_stride`` and ``row_stride`` count pairs.

    K is a multiple of 128. ``ROW`` and ``COL`` are the formats of the two operands: 4, 8, or 0 for none.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    words = _result(y_ptr, y_stride, M, K, m, k, HARDWARE)
    store_both(
        words, y_ptr, y_ptr, y_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
        M, K, m, k, row_stride, col_stride, 0, 0, 0, 0, ROW, COL, False, False, False, True, HARDWARE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_word_0", "row_word_1", "col_word_0", "col_word_1"])
def swiglu_gradient_kernel(
    d_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, cols_ptr, row_key_ptr, col_key_ptr,
    M, K, col_stride, row_word_0, row_word_1, col_word_0, col_word_1,
    d_stride: tl.constexpr, y_stride: tl.constexpr, row_stride: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_RANDOM: tl.constexpr, COL_RANDOM: tl.constexpr, LOADED: tl.constexpr,
    PAIRED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise the gradient [M, 2K] of SwiGLU of y [M, 2K], from the gradient d [M, K] of its result.

    Neighbouring programs compute the gates' part and that of the other half, so that the second reads from cache.
    """
    k, m, half = tl.program_id(0) // 2, tl.program_id(1), tl.program_id(0) % 2
    words = _gradient(d_ptr, y_ptr, d_stride, y_stride, M, K, m, k, half, HARDWARE)
    store_both(
        words, y_ptr, cols_ptr, row_key_ptr, col_key_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
        M, 2 * K, m, half * (K // EDGE) + k, row_stride, col_stride,
        row_word_0, row_word_1, col_word_0, col_word_1,
        ROW, COL, ROW_RANDOM, COL_RANDOM, LOADED, PAIRED, HARDWARE,
    )  # fmt: skip


@triton.jit
def _store_with_amax(words, out_ptr, amax_ptr, M, m, k, stride, HARDWARE: tl.constexpr):
    """Store part (m, k) of bf16 pairs, and update ``amax_ptr`` (int32) with the FP32 bits of its amax."""
    store_rows(out_ptr, words, m, k, stride, m * EDGE + tl.arange(0, EDGE) < M)
    lo, hi = amax_pairs(words, words, False, "bf16", True, HARDWARE)
    amax = tl.max(tl.maximum(lo, hi), axis=0)
    # Few programs find a number that is larger than what is there, and atomics at one address wait for each other.
    tl.atomic_max(amax_ptr, amax, mask=amax > tl.load(amax_ptr, cache_modifier=".cg"))


@triton.jit
def swiglu_amax_kernel(y_ptr, x_ptr, amax_ptr, M, K, y_stride: tl.constexpr, HARDWARE: tl.constexpr):
    """Store SwiGLU [M, K] of y [M, 2K] as bf16 pairs, and its amax to ``amax_ptr``, which holds zero before.

    K is a multiple of 128, and ``y_stride`` counts pairs.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    words = _result(y_ptr, y_stride, M, K, m, k, HARDWARE)
    _store_with_amax(words, x_ptr, amax_ptr, M, m, k, K // 2, HARDWARE)


@triton.jit
def swiglu_gradient_amax_kernel(
    d_ptr, y_ptr, g_ptr, amax_ptr, M, K, d_stride: tl.constexpr, y_stride: tl.constexpr, HARDWARE: tl.constexpr
):  # fmt: skip
    """Store the gradient [M, 2K] of SwiGLU as bf16 pairs, and its amax to ``amax_ptr``, which holds zero before.

    Neighbouring programs share what they read, as those of :func:`swiglu_gradient_kernel` do.
    """
    k, m, half = tl.program_id(0) // 2, tl.program_id(1), tl.program_id(0) % 2
    words = _gradient(d_ptr, y_ptr, d_stride, y_stride, M, K, m, k, half, HARDWARE)
    _store_with_amax(words, g_ptr, amax_ptr, M, m, half * (K // EDGE) + k, K, HARDWARE)
