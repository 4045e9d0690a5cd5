# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that loads and stores 128×128 parts of a matrix, as 64 pairs of columns, and finds their amax.

A part is loaded twice, the second time from cache. The first load gives each thread rows, for tiles along a row and
row-major output. The second load gives each thread the rows of one pair of columns, for tiles along a column and
transposed output. So a tile never leaves its warp, and nothing is transposed through shared memory. The shape of the
second load is [64, 64, 2], with the halves of the rows last: the compiler then assigns 2·16 rows of one pair to a
thread and the other rows to 4 lanes, so that 8 lanes read 32 adjacent bytes and a store writes 64. Strides are
constants of a kernel: a model has few widths, and constant strides make addresses free.
"""

import triton
import triton.language as tl

from snip_megatron.numerics.quantize.kernels.elements import magnitude_bits

EDGE = tl.constexpr(128)
PAIRS = tl.constexpr(64)
HALF = tl.constexpr(64)


@triton.jit
def _rows(DOWN: tl.constexpr):
    """Return local rows of a part, [128, 1], or [64, 1, 2] with ``DOWN``."""
    if DOWN:
        return tl.arange(0, HALF)[:, None, None] + HALF * tl.arange(0, 2)[None, None, :]
    else:
        return tl.arange(0, EDGE)[:, None]


@triton.jit
def over_rows(vector, DOWN: tl.constexpr):
    """Expand a vector of columns so that it broadcasts over rows."""
    return vector[None, :, None] if DOWN else vector[None, :]


@triton.jit
def load_pairs(x_ptr, x_stride, M, width, m, k, DOWN: tl.constexpr):
    """Load part (m, k) as int32 words of two 16-bit numbers, zero outside the matrix: [128, 64], or [64, 64, 2] with
    ``DOWN``, where threads hold rows.

    ``x_stride`` and ``width`` count words.
    """
    i, j = _rows(DOWN), over_rows(tl.arange(0, PAIRS), DOWN)
    pointers = x_ptr + m.to(tl.int64) * EDGE * x_stride + k * PAIRS + i * x_stride + j
    if DOWN:  # hides contiguity, so that the compiler chooses the layout of the transposed store for this load
        pointers = tl.max_contiguous(pointers, [1, 1, 1])
    inside = (m * EDGE + i < M) & (k * PAIRS + j < width)
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def _half_bits(bits, DTYPE: tl.constexpr):
    """Return FP32 of the 16-bit numbers in the lower halves of int32."""
    if DTYPE == "bf16":
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def numbers(words, DTYPE: tl.constexpr):
    """Return FP32 of the even and of the odd columns."""
    if DTYPE == "bf16":
        return _half_bits(words, DTYPE), (words & -65536).to(tl.float32, bitcast=True)
    else:
        return _half_bits(words, DTYPE), _half_bits(words >> 16, DTYPE)


@triton.jit
def lifted(words, lo_lift, hi_lift, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """Return ``numbers`` times powers of two (one per tile)."""
    if HARDWARE and (DTYPE == "bf16"):  # one multiplication per pair
        lift = (lo_lift.to(tl.uint32, bitcast=True) >> 16) | hi_lift.to(tl.uint32, bitcast=True)
        words = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [words, lift], dtype=tl.int32, is_pure=True, pack=1
        )
        return numbers(words, DTYPE)
    else:
        lo, hi = numbers(words, DTYPE)
        return lo * lo_lift, hi * hi_lift


@triton.jit
def _max_bf16(a, b):  # maximum of the magnitudes, NaN above all; the sign of the result has no meaning
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _max_fp16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _largest(x, DOWN: tl.constexpr, DTYPE: tl.constexpr):
    """Return the maximum of each column (``DOWN``) or row, of integers if ``DTYPE`` is empty, or of two numbers per
    word.
    """
    last: tl.constexpr = 2 if DOWN else 1
    if DTYPE == "bf16":
        x = tl.reduce(x, last, _max_bf16)
        return tl.reduce(x, 0, _max_bf16) if DOWN else x
    elif DTYPE == "fp16":
        x = tl.reduce(x, last, _max_fp16)
        return tl.reduce(x, 0, _max_fp16) if DOWN else x
    else:
        x = tl.max(x, axis=last)
        return tl.max(x, axis=0) if DOWN else x


@triton.jit
def amax_pairs(words, DOWN: tl.constexpr, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the FP32 bits of max|x| of each column (``DOWN``) or row, separately for even and odd columns."""
    if HARDWARE:
        pairs = _largest(words, DOWN, DTYPE) & 0x7FFF7FFF
        lo, hi = _half_bits(pairs & 0xFFFF, DTYPE), _half_bits(pairs >> 16, DTYPE)
        return lo.to(tl.int32, bitcast=True), hi.to(tl.int32, bitcast=True)
    else:
        lo, hi = numbers(words, DTYPE)
        return _largest(magnitude_bits(lo), DOWN, ""), _largest(magnitude_bits(hi), DOWN, "")


@triton.jit
def store_rows(ptr, words, m, k, stride, row_mask):
    """Store pairs [128, 64] to part (m, k) of a matrix whose width is padded to 128; ``stride`` counts pairs."""
    i, j = tl.arange(0, EDGE), tl.arange(0, PAIRS)
    base = ptr + m.to(tl.int64) * EDGE * stride + k * PAIRS
    tl.store(base + i[:, None] * stride + j[None, :], words, mask=row_mask[:, None])


@triton.jit
def store_columns(ptr, lo, hi, m, k, stride, lo_mask, hi_mask):
    """Store bytes [64, 64, 2] of the even and odd columns of part (m, k) to rows of the transposed matrix."""
    j = over_rows(tl.arange(0, PAIRS), True)
    base = ptr + k.to(tl.int64) * EDGE * stride + m * EDGE
    base = base + 2 * j * stride + _rows(True)
    tl.store(base, lo, mask=over_rows(lo_mask, True))
    tl.store(base + stride, hi, mask=over_rows(hi_mask, True))
