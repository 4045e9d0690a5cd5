# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that moves 128×128 parts of a matrix, as 64 pairs of columns, and finds their largest magnitudes.

A part is read twice, the second time from cache: once with rows in threads (for tiles along a row, and row-major
output), once with 16 rows of one pair of columns in each thread (for tiles along a column, and transposed output). So a
tile never leaves its warp, and nothing is transposed through shared memory.
"""

import triton
import triton.language as tl

EDGE = tl.constexpr(128)
PAIRS = tl.constexpr(64)


@triton.jit
def load_pairs(x_ptr, x_stride, M, width, m, k, DOWN: tl.constexpr, WORDS: tl.constexpr):
    """Part (m, k) [128, 64] twice: 32-bit words if ``WORDS`` (``x_stride`` and ``width`` count them), else even and odd
    columns in x's own type. Zeros outside the matrix. ``DOWN``: threads hold rows of a column."""
    i, j = tl.arange(0, EDGE), tl.arange(0, PAIRS)
    base = x_ptr + m.to(tl.int64) * EDGE * x_stride
    inside = (m * EDGE + i < M)[:, None]
    if WORDS:
        pointers = base + k * PAIRS + i[:, None] * x_stride + j[None, :]
        if DOWN:  # unaware of contiguity, the compiler gives this load the layout of the transposed store
            pointers = tl.max_contiguous(pointers, [1, 1])
        words = tl.load(pointers, mask=inside & (k * PAIRS + j < width)[None, :], other=0)
        return words, words
    else:
        cols = 2 * (k * PAIRS + j)
        pointers = base + i[:, None] * x_stride + cols[None, :]
        lo = tl.load(pointers, mask=inside & (cols < width)[None, :], other=0.0)
        return lo, tl.load(pointers + 1, mask=inside & (cols + 1 < width)[None, :], other=0.0)


@triton.jit
def _to_float32(x):
    if x.dtype == tl.bfloat16:  # its bits are FP32's upper half; the interpreter's own conversion loses subnormals
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _half_bits(bits, DTYPE: tl.constexpr):
    """FP32 of 16-bit numbers in the lower halves of int32."""
    if DTYPE == "bf16":
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def numbers(a, b, DTYPE: tl.constexpr, WORDS: tl.constexpr):
    """FP32 of even and of odd columns."""
    if WORDS:
        if DTYPE == "bf16":
            return _half_bits(a, DTYPE), (a & -65536).to(tl.float32, bitcast=True)
        else:
            return _half_bits(a, DTYPE), _half_bits(a >> 16, DTYPE)
    else:
        return _to_float32(a), _to_float32(b)


@triton.jit
def lifted(a, b, lo_lift, hi_lift, DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr):
    """``numbers`` times powers of two (one a tile)."""
    if WORDS and HARDWARE and (DTYPE == "bf16"):  # one multiplication a pair
        lift = (lo_lift.to(tl.uint32, bitcast=True) >> 16) | hi_lift.to(tl.uint32, bitcast=True)
        words = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, lift], dtype=tl.int32, is_pure=True, pack=1
        )
        return numbers(words, words, DTYPE, WORDS)
    else:
        lo, hi = numbers(a, b, DTYPE, WORDS)
        return lo * lo_lift, hi * hi_lift


@triton.jit
def sign_words(a, lo, hi, WORDS: tl.constexpr):
    """int32 with the signs of a pair in bits 15 and 31."""
    if WORDS:
        return a
    else:
        return ((lo.to(tl.int32, bitcast=True) >> 16) & 0x8000) | (hi.to(tl.int32, bitcast=True) & -0x80000000)


@triton.jit
def _max_bf16(a, b):  # of the magnitudes, NaN above all; the signs are of no use
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _max_fp16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # integers order as magnitudes do, NaN above Inf


@triton.jit
def amax_pairs(a, b, AXIS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 bits of max|x| along ``AXIS``, of even and of odd columns."""
    if WORDS and HARDWARE:
        pairs = tl.reduce(a, AXIS, _max_bf16 if DTYPE == "bf16" else _max_fp16) & 0x7FFF7FFF
        lo, hi = _half_bits(pairs & 0xFFFF, DTYPE), _half_bits(pairs >> 16, DTYPE)
        return lo.to(tl.int32, bitcast=True), hi.to(tl.int32, bitcast=True)
    else:
        lo, hi = numbers(a, b, DTYPE, WORDS)
        return tl.max(_magnitude(lo), axis=AXIS), tl.max(_magnitude(hi), axis=AXIS)


@triton.jit
def store_rows(ptr, words, m, k, stride, row_mask):
    """int16 [128, 64] to part (m, k) of a byte matrix whose width is padded to 128; ``stride`` counts pairs."""
    i, j = tl.arange(0, EDGE), tl.arange(0, PAIRS)
    base = ptr + m.to(tl.int64) * EDGE * stride + k * PAIRS
    tl.store(base + i[:, None] * stride + j[None, :], words, mask=row_mask[:, None])


@triton.jit
def store_columns(ptr, lo, hi, m, k, stride, lo_mask, hi_mask):
    """Bytes [128, 64] of even and odd columns of part (m, k) to rows of the transposed matrix."""
    i, j = tl.arange(0, EDGE), tl.arange(0, PAIRS)
    base = ptr + k.to(tl.int64) * EDGE * stride + m * EDGE
    base = base + (2 * j)[None, :] * stride + i[:, None]
    tl.store(base, lo, mask=lo_mask[None, :])
    tl.store(base + stride, hi, mask=hi_mask[None, :])
