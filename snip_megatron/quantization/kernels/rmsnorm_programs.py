# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that computes RMSNorm and quantises the result, which never lies in memory as bf16.

The additions have the order of ``quantization/rmsnorm.py``, whatever threads of these kernels execute them: a sum over
an axis of two elements is one addition. Nothing is contracted to a fused multiply-add that is not written as one, for
which ``reciprocal_kernel`` is launched without ``enable_fp_fusion``.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.elements import fma
from snip_megatron.quantization.kernels.pairs import EDGE, PAIRS, numbers
from snip_megatron.quantization.kernels.results import load_numbers, rounded_words, store_both

LANES = tl.constexpr(32)


@triton.jit
def _add_word(total, word, mean, SQUARES: tl.constexpr, HARDWARE: tl.constexpr):
    """Add a pair of elements, or the squares of their deviations from ``mean``."""
    lo, hi = numbers(word, word, "bf16", True)
    if SQUARES:
        lo, hi = lo - mean, hi - mean
        return fma(hi, hi, fma(lo, lo, total, HARDWARE), HARDWARE)
    else:
        return (total + lo) + hi


@triton.jit
def _thread_sums(
    pointers, mean, FEATURES: tl.constexpr, VECTOR: tl.constexpr, THREADS: tl.constexpr, SQUARES: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return the sums of the threads of an order, FP32 [THREADS]. ``mean`` is 0 or has that shape."""
    total = tl.zeros((THREADS,), tl.float32)
    for load in tl.static_range(FEATURES // (THREADS * VECTOR)):  # a second pass finds the words in registers
        words = tl.load(pointers + load * (THREADS * VECTOR // 2))
        if VECTOR == 8:
            even, odd = tl.split(tl.reshape(words, (THREADS, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            total = _add_word(total, first, mean, SQUARES, HARDWARE)
            total = _add_word(total, second, mean, SQUARES, HARDWARE)
            total = _add_word(total, third, mean, SQUARES, HARDWARE)
            total = _add_word(total, fourth, mean, SQUARES, HARDWARE)
        else:
            first, second = tl.split(words)
            total = _add_word(total, first, mean, SQUARES, HARDWARE)
            total = _add_word(total, second, mean, SQUARES, HARDWARE)
    return total


@triton.jit
def _over_lanes(x, WARPS: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Return the sum of each warp [WARPS] of x [WARPS · 32]: neighbours are added first, or else halves."""
    for step in tl.static_range(5):
        if NEIGHBOURS:
            x = tl.sum(tl.reshape(x, (WARPS, LANES >> (step + 1), 2)), axis=2)
        else:
            x = tl.sum(tl.reshape(x, (WARPS, 2, LANES >> (step + 1))), axis=1)
    return tl.reshape(x, (WARPS,))


@triton.jit
def _halves(x, N: tl.constexpr):
    """Return the first and the second half of x [2N]."""
    return tl.split(tl.permute(tl.reshape(x, (2, N)), (1, 0)))


@triton.jit
def _merge(mean, squares, N: tl.constexpr, HALF: tl.constexpr, HARDWARE: tl.constexpr):
    """Merge 2N means and sums of squared deviations, each of 2 · HALF elements, to N (Chan et al., 1979)."""
    mean, other = _halves(mean, N)
    squares, other_squares = _halves(squares, N)
    between = mean - other
    squares = fma(between * between, tl.full((N,), HALF, tl.float32), squares + other_squares, HARDWARE)
    return (mean + other) * 0.5, squares


@triton.jit
def _mean_square(
    pointers, FEATURES: tl.constexpr, VECTOR: tl.constexpr, WARPS: tl.constexpr, CENTRED: tl.constexpr,
    OF_WARP: tl.constexpr, OF_ROW: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return the mean of the squares of a row, FP32 [1]."""
    THREADS: tl.constexpr = WARPS * LANES
    if CENTRED:
        total = _thread_sums(pointers, 0.0, FEATURES, VECTOR, THREADS, False, HARDWARE)
        mean = _over_lanes(total, WARPS, True) * OF_WARP
        of_threads = tl.reshape(tl.broadcast_to(mean[:, None], (WARPS, LANES)), (THREADS,))
        total = _thread_sums(pointers, of_threads, FEATURES, VECTOR, THREADS, True, HARDWARE)
        squares = _over_lanes(total, WARPS, True)
        if WARPS == 4:
            mean, squares = _merge(mean, squares, 2, FEATURES // 8, HARDWARE)
            mean, squares = _merge(mean, squares, 1, FEATURES // 4, HARDWARE)
        return fma(mean, mean, squares * OF_ROW, HARDWARE)
    else:
        total = _thread_sums(pointers, 0.0, FEATURES, VECTOR, THREADS, True, HARDWARE)
        squares = _over_lanes(total, WARPS, False)
        if WARPS == 4:
            first, second = _halves(squares, 2)
            first, second = _halves(first + second, 1)
            squares = first + second
        return tl.div_rn(squares, tl.full((1,), FEATURES, tl.float32))


@triton.jit
def _rsqrt(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / tl.sqrt_rn(x)


@triton.jit
def reciprocal_kernel(
    x_ptr, rs_ptr, x_stride: tl.constexpr, FEATURES: tl.constexpr, VECTOR: tl.constexpr, WARPS: tl.constexpr,
    CENTRED: tl.constexpr, EPS: tl.constexpr, OF_WARP: tl.constexpr, OF_ROW: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store 1 / sqrt(mean(x²) + EPS) of a row of bf16 x [., FEATURES], FP32. ``x_stride`` counts pairs.

    ``OF_WARP`` and ``OF_ROW`` are the reciprocals of the numbers of elements of a warp and of a row.
    """
    row = tl.program_id(0)
    threads, words = tl.arange(0, WARPS * LANES)[:, None], tl.arange(0, VECTOR // 2)[None, :]
    pointers = x_ptr + row.to(tl.int64) * x_stride + threads * (VECTOR // 2) + words
    found = _mean_square(pointers, FEATURES, VECTOR, WARPS, CENTRED, OF_WARP, OF_ROW, HARDWARE)
    tl.store(rs_ptr + row + tl.arange(0, 1), _rsqrt(found + EPS, HARDWARE))


@triton.jit
def rmsnorm_kernel(
    x_ptr, gamma_ptr, rs_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, M, K, col_stride,
    x_stride: tl.constexpr, row_stride: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise RMSNorm [M, K] of bf16 x. ``x_stride`` and ``row_stride`` count pairs.

    K is a multiple of 128. ``ROW`` and ``COL`` are the formats of the two operands: 4, 8, or 0 for none.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    lo, hi = load_numbers(x_ptr, x_stride, M, K // 2, m, k)
    gamma = tl.load(gamma_ptr + k * PAIRS + tl.arange(0, PAIRS))
    gamma_lo, gamma_hi = numbers(gamma, gamma, "bf16", True)
    if ZERO_CENTRED:
        gamma_lo, gamma_hi = gamma_lo + 1.0, gamma_hi + 1.0
    rows = (m * EDGE + tl.arange(0, EDGE))[:, None]
    rs = tl.load(rs_ptr + rows, mask=rows < M, other=0.0)
    words = rounded_words(lo * rs * gamma_lo[None, :], hi * rs * gamma_hi[None, :], HARDWARE)
    words = tl.where(rows < M, words, 0)  # padding is +0, also beside a negative weight
    store_both(
        words, x_ptr, x_ptr, x_ptr, x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
        M, K, m, k, row_stride, col_stride, 0, 0, 0, 0, ROW, COL, False, False, False, True, HARDWARE,
    )  # fmt: skip
