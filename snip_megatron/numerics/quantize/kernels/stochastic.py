# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of stochastic rounding: the hash of ``rounding.py``, and rounding to E2M1 by adding the draw to FP32
bits.
"""

import triton
import triton.language as tl

from snip_megatron.numerics.quantize.kernels.elements import bytes_of, joined, reciprocal
from snip_megatron.numerics.quantize.kernels.pairs import over_rows


@triton.jit
def mix32(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def once(keys):
    """Compute the keys once and share them. The compiler would compute them again in every thread."""
    return tl.gather(keys.to(tl.int32, bitcast=True), tl.arange(0, keys.shape[0]), 0).to(tl.uint32, bitcast=True)


@triton.jit
def _words(row_words, cols, word, HALVES: tl.constexpr):
    """Return uint32 of rows by columns: one word for columns 2i and 2i + 1. The word is the draw of column 2i + 1."""
    factor = mix32((cols.to(tl.uint32) >> 1) * 0x85EBCA77 + word.to(tl.uint32)) | 1
    if not HALVES:  # a thread has many columns
        factor = once(factor)
    factor = over_rows(factor, HALVES)
    h = row_words * factor
    return ((h << 16) | (h >> 16)) * 0x9E3779B1 + factor


@triton.jit
def _even_draw(words):
    return words * 0xADB4A92D


@triton.jit
def _drawn(words, cols, HALVES: tl.constexpr):
    """Return the draws of columns that need not be pairs."""
    return tl.where(over_rows((cols & 1) == 0, HALVES), _even_draw(words), words)


@triton.jit
def random_pairs(rows, lo_cols, hi_cols, row_word, col_word, HALVES: tl.constexpr, PAIRED: tl.constexpr):
    """Return two uint32 tensors of draws [128, 64], or [64, 64, 2] with the halves of the rows last if ``HALVES``.

    Row and column ids are vectors; the words are ``rounding.key_words`` of the seed. ``PAIRED``: each (lo_cols,
    hi_cols) is some (2i, 2i + 1), so that one hash serves both.
    """
    row_words = mix32(rows.to(tl.uint32) * 0x9E3779B1 + row_word.to(tl.uint32))
    if HALVES:  # a thread has many rows
        row_words = tl.trans(tl.reshape(once(row_words), (2, rows.shape[0] // 2)))
    row_words = tl.expand_dims(row_words, 1)
    lo = _words(row_words, lo_cols, col_word, HALVES)
    if PAIRED:
        return _even_draw(lo), lo
    else:
        hi = _words(row_words, hi_cols, col_word, HALVES)
        return _drawn(lo, lo_cols, HALVES), _drawn(hi, hi_cols, HALVES)


@triton.jit
def _stochastic_byte(y, bits):
    """Round y to E2M1 stochastically and return its E4M3 byte (int32).

    The index of an E2M1 number, 0 to 7, is the upper bits of a count of FP32 numbers 2^-126·|y|, which continues below
    1 as above. The 22 bits below the index are compared with the draw.
    """
    magnitude = tl.abs(y)
    below = (magnitude * 8388608.0).to(tl.int32)
    index = tl.where(magnitude < 1.0, below, magnitude.to(tl.int32, bitcast=True) - (126 << 23))
    index = (index + (bits >> 10).to(tl.int32, bitcast=True)) >> 22
    return tl.where(index < 2, 0x30 * index, 0x30 + 4 * tl.minimum(index, 7))


@triton.jit
def _rounded(x, inverse, bits, back):
    """Return FP32 x · inverse · 2^126, rounded to E2M1 stochastically. The product is truncated towards zero: it
    never exceeds 6.

    FP32 numbers 2^-126·|y| are counted by their bits, and the upper bits of the count are the E2M1 number, below 1 as
    above. So the draw is added to the 22 bits that follow.
    """
    y = tl.inline_asm_elementwise(
        "mul.rz.f32 $0, $1, $2;", "=f,f,f", [x, inverse + tl.zeros_like(x)], dtype=tl.float32, is_pure=True, pack=1
    )
    counted = y.to(tl.int32, bitcast=True) + (bits >> 10).to(tl.int32, bitcast=True)
    return (counted & -4194304).to(tl.float32, bitcast=True) * back


@triton.jit
def less_if_subnormal(inverse, scale):
    """Return ``inverse``, reduced by 2^-12 if its scale is subnormal.

    The few bits of such a scale could let the largest number exceed 6.
    """
    return tl.where(scale < 1.1754943508222875e-38, inverse * 0.999755859375, inverse)  # 2^-126; 1 − 2^-12


@triton.jit
def stochastic_bytes(
    words, lo, hi, lo_scale, hi_scale, lo_lift, hi_lift, lo_bits, hi_bits,
    JOIN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Multiply lifted FP32 pairs by the reciprocals of their scales, round to E2M1 stochastically, and return E4M3
    bytes.

    Saturates. Bits 15 and 31 of ``words`` hold the signs.
    """
    lo_inverse = less_if_subnormal(reciprocal(lo_scale * lo_lift, HARDWARE), lo_scale)
    hi_inverse = less_if_subnormal(reciprocal(hi_scale * hi_lift, HARDWARE), hi_scale)
    if HARDWARE:
        lo_back = tl.where(lo_scale != lo_scale, float("nan"), 8.507059173023462e37)  # 2^126
        hi_back = tl.where(hi_scale != hi_scale, float("nan"), 8.507059173023462e37)
        lo = _rounded(lo, lo_inverse * 1.1754943508222875e-38, lo_bits, lo_back)
        hi = _rounded(hi, hi_inverse * 1.1754943508222875e-38, hi_bits, hi_back)
        return bytes_of(lo, hi, JOIN, HARDWARE)
    else:
        lo = _stochastic_byte(lo * lo_inverse, lo_bits)
        hi = _stochastic_byte(hi * hi_inverse, hi_bits)
        lo = lo | ((words >> 8) & 0x80) | tl.where(lo_scale != lo_scale, 0x7F, 0)
        hi = hi | ((words >> 24) & 0x80) | tl.where(hi_scale != hi_scale, 0x7F, 0)
        return joined(lo, hi, JOIN)
