# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of stochastic rounding: ``rounding.py``'s hash, and E2M1 by a sum of bits."""

import triton
import triton.language as tl

from snip_megatron.quantization.triton_elements import joined, reciprocal


@triton.jit
def _mix32(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _once(keys):
    """The same, computed once and handed out through shared memory: the compiler would repeat it in every thread."""
    return tl.gather(keys.to(tl.int32, bitcast=True), tl.arange(0, keys.shape[0]), 0).to(tl.uint32, bitcast=True)


@triton.jit
def _swapped(h):
    return (h << 16) | (h >> 16)


@triton.jit
def _mixed(rows, cols, word, other_word, column_word, HARDWARE: tl.constexpr):
    """uint32 [len(rows), len(cols)]: the hash before its last multiplication, one for columns 2i and 2i + 1."""
    first = _mix32(rows.to(tl.uint32) * 0x9E3779B1 + word.to(tl.uint32))
    second = _once(_mix32(first ^ other_word.to(tl.uint32)))
    first = _once(first)
    column = _once(_mix32((cols.to(tl.uint32) >> 1) * 0x85EBCA77 + column_word.to(tl.uint32)))
    h = (first[:, None] ^ column[None, :]) * 0x85EBCA6B
    return _swapped(_swapped(h) * 0xC2B2AE35 + second[:, None])


@triton.jit
def random_pairs(rows, lo_cols, hi_cols, word, other_word, column_word, PAIRED: tl.constexpr, HARDWARE: tl.constexpr):
    """Two of uint32 [len(rows), len(cols)]; ids are vectors; words: ``rounding.key_words`` of the seed.

    ``PAIRED``: each (lo_cols, hi_cols) is some (2i, 2i + 1), so that one hash serves both.
    """
    lo = _mixed(rows, lo_cols, word, other_word, column_word, HARDWARE)
    if PAIRED:
        hi = lo * 0x27D4EB2F
        lo = lo * 0x9E3779B1
    else:
        hi = _mixed(rows, hi_cols, word, other_word, column_word, HARDWARE)
        hi = hi * tl.where((hi_cols & 1) == 0, 0x9E3779B1, 0x27D4EB2F).to(tl.uint32)[None, :]
        lo = lo * tl.where((lo_cols & 1) == 0, 0x9E3779B1, 0x27D4EB2F).to(tl.uint32)[None, :]
    return lo, hi


@triton.jit
def _truncated_product(x, inverse):
    """x · inverse rounded to zero, where no assembly runs."""
    product = x.to(tl.float64) * inverse.to(tl.float64)  # exact
    nearest = product.to(tl.float32)
    above = (tl.abs(nearest).to(tl.float64) > tl.abs(product)).to(tl.int32)
    return (nearest.to(tl.int32, bitcast=True) - above).to(tl.float32, bitcast=True)


@triton.jit
def _stochastic_byte(y, bits, sign_and_nan):
    """The E4M3 byte (int32) of y rounded to E2M1, up as often as the distance to the lower number asks for.

    E2M1's numbers are counted 0 to 7 by their bits, and so are FP32's of 2^-126·|y|, below 1 as above: 22 bits follow
    that are compared with the draw.
    """
    magnitude = tl.abs(y)
    below = (magnitude * 8388608.0).to(tl.int32)
    index = tl.where(magnitude < 1.0, below, magnitude.to(tl.int32, bitcast=True) - (126 << 23))
    index = (index + (bits >> 10).to(tl.int32, bitcast=True)) >> 22
    code = tl.where(index < 2, 0x30 * index, 0x30 + 4 * tl.minimum(index, 7))
    return code | sign_and_nan


# Instructions of one element: 2^-126·|x/scale| cut to 22 bits below the last one that stays (the shift drops its sign),
# plus the draw; the count less one is left in the upper four bits of t.
_COUNT = (
    "mul.rz.f32 f, {x}, {inverse}; mov.b32 t, f; mad.lo.s32 t, t, 64, -268435456;"
    " shr.u32 u, {bits}, 4; add.s32 t, t, u; "
)


def _four(x, inverse, bits, table, signs, out):
    """Assembly: four elements (registers, last first) to four bytes. Their counts select bytes of the table; −1 (its
    upper bit set) repeats the sign of the table's last byte instead: zero, or NaN in a table of those."""
    text = _COUNT.format(x=x[0], inverse=inverse, bits=bits[0]) + "shr.u32 a, t, 28; "
    for i in range(1, 4):
        text += _COUNT.format(x=x[i], inverse=inverse, bits=bits[i]) + "shf.l.wrap.b32 a, t, a, 4; "
    return text + f"prmt.b32 a, {table[0]}, {table[1]}, a; {signs} lop3.b32 {out}, s, 0x80808080, a, 0xEA; "


_DECLARED = "{ .reg .b32 a, p, r, s, t, u; .reg .f32 f; "
# Pairs of registers from 1: words, lo, hi, bits of lo, bits of hi, reciprocals, lower and upper half of the table.
_JOINED = tl.constexpr(
    _DECLARED
    + _four(
        ("$6", "$4", "$5", "$3"), "$11", ("$10", "$8", "$9", "$7"), ("$13", "$15"), "prmt.b32 s, $1, $2, 0x7531;", "$0"
    )
    + "}"
)
# Fours from 2: words, lo, hi, bits of lo and of hi, reciprocals for lo and for hi, table's halves for lo and for hi.
_APART = tl.constexpr(
    _DECLARED
    + "prmt.b32 p, $2, $3, 0x7351; prmt.b32 r, $4, $5, 0x7351; "
    + _four(
        ("$9", "$8", "$7", "$6"), "$22", ("$17", "$16", "$15", "$14"), ("$30", "$34"), "prmt.b32 s, p, r, 0x5410;", "$0"
    )
    + _four(
        ("$13", "$12", "$11", "$10"), "$26", ("$21", "$20", "$19", "$18"), ("$38", "$42"), "prmt.b32 s, p, r, 0x7632;",
        "$1",
    )
    + "}"
)  # fmt: skip
_JOINED_REGISTERS = tl.constexpr("=r,r,r,f,f,f,f,r,r,r,r,f,f,r,r,r,r")
_APART_REGISTERS = tl.constexpr("=&r,=&r" + ",r" * 4 + ",f" * 8 + ",r" * 8 + ",f" * 8 + ",r" * 16)


@triton.jit
def _table(scale):
    """Bytes of E2M1's numbers above zero and once more the last; all NaN for a scale that is."""
    nan = tl.where(scale != scale, -1, 0)
    return nan | 0x403C3830, nan | 0x4C4C4844


@triton.jit
def stochastic_bytes(
    words, lo, hi, lo_scale, hi_scale, lo_lift, hi_lift, lo_bits, hi_bits,
    JOIN: tl.constexpr, DTYPE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """E4M3 bytes of lifted FP32 pairs times their scales' reciprocals, rounded to E2M1 stochastically; saturates.

    Bits 15 and 31 of ``words`` hold the signs.
    """
    lo_inverse = reciprocal(lo_scale * lo_lift, DTYPE, HARDWARE)
    hi_inverse = reciprocal(hi_scale * hi_lift, DTYPE, HARDWARE)
    if HARDWARE:
        lo_inverse, hi_inverse = lo_inverse * 1.1754943508222875e-38, hi_inverse * 1.1754943508222875e-38
        lo_low, lo_high = _table(lo_scale)
        hi_low, hi_high = _table(hi_scale)
        if JOIN:
            both = tl.inline_asm_elementwise(
                _JOINED, _JOINED_REGISTERS, [words, lo, hi, lo_bits, hi_bits, lo_inverse, lo_low, lo_high],
                dtype=tl.int16, is_pure=True, pack=2,
            )  # fmt: skip
            return both, both
        else:
            return tl.inline_asm_elementwise(
                _APART, _APART_REGISTERS,
                [words, lo, hi, lo_bits, hi_bits, lo_inverse, hi_inverse, lo_low, lo_high, hi_low, hi_high],
                dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        lo = _stochastic_byte(_truncated_product(lo, lo_inverse), lo_bits, 0)
        hi = _stochastic_byte(_truncated_product(hi, hi_inverse), hi_bits, 0)
        lo = lo | ((words >> 8) & 0x80) | tl.where(lo_scale != lo_scale, 0x7F, 0)
        hi = hi | ((words >> 24) & 0x80) | tl.where(hi_scale != hi_scale, 0x7F, 0)
        return joined(lo, hi, JOIN)
