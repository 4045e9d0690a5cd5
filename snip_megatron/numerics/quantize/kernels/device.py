# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that the kernels share: numbers, 128×128 parts of a matrix, stochastic rounding.

Results equal those of ``rounding.py`` and ``reference.py``. Values come in pairs (``lo``, ``hi``): an even and an odd
column, which share a 32-bit word of a bf16 matrix. With ``HARDWARE`` the code uses Hopper's instructions on pairs,
otherwise it builds bytes from the bits of FP32. The interpreter takes the second path, because it runs no assembly and
its conversion to E4M3 does not round to even.

A part is loaded twice, the second time from cache. The first load gives each thread rows, for tiles along a row. The
second load gives each thread the rows of one pair of columns, for tiles along a column and transposed output. So a tile
never leaves its warp, and nothing is transposed through shared memory. The shape of the second load is [64, 64, 2],
with the halves of the rows last: the compiler then assigns 2·16 rows of one pair to a thread and the other rows to 4
lanes, so that 8 lanes read 32 adjacent bytes and a store writes 64. Strides are constants of a kernel, which make
addresses free.
"""

import triton
import triton.language as tl

# -- numbers ---------------------------------------------------------------------------------------------------------
INFINITY_BITS = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def fma(a, b, c, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.fma(a, b, c)
    else:  # the interpreter's fma rounds the product; in float64 the product is exact
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


@triton.jit
def constant_like(value: tl.constexpr, x):
    """Return ``value`` in the shape of ``x``: no instruction on a GPU, a tensor for the interpreter."""
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def _negate(x):
    return x * -1.0  # Triton computes -x as 0 − x, which needs an addition and gives +0 for x = +0


@triton.jit
def to_float32(x):
    if x.dtype == tl.bfloat16:  # bf16 is the upper half of FP32; the interpreter's own conversion loses subnormals
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # integers have the order of the magnitudes, NaN above Inf


@triton.jit
def tile_scale(amax_bits, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, DIVIDE: tl.constexpr = False):
    """Return the FP32 scale of a tile, amax / 448 or amax / 6 in IEEE division, from the bits of max|x|.

    The scale is NaN if amax is NaN or Inf, and 1 if amax / maximum is zero.
    """
    amax = amax_bits.to(tl.float32, bitcast=True)
    maximum: tl.constexpr = 448.0 if FORMAT == 8 else 6.0
    inverse: tl.constexpr = 0.002232142857142857 if FORMAT == 8 else 0.16666666666666666
    if DIVIDE:
        scale = tl.div_rn(amax, constant_like(maximum, amax))
    else:  # equals the division for every magnitude of a 16-bit dtype, subnormal quotients included (tested)
        scale = amax * inverse
        residual = fma(scale, constant_like(maximum, amax), _negate(amax), HARDWARE)
        scale = fma(_negate(residual), constant_like(inverse, amax), scale, HARDWARE)
    scale = tl.where(amax_bits >= INFINITY_BITS, float("nan"), scale)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def scale_lift(scale):
    """Return the power of two that brings ``scale`` to [0.5, 1). A subnormal scale comes out smaller."""
    exponent = scale.to(tl.int32, bitcast=True) & INFINITY_BITS
    return ((253 << 23) - exponent).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(scale, HARDWARE: tl.constexpr):
    """Return 1 / scale to nearest, for a lifted scale. Tested for every scale that 16-bit numbers give."""
    if HARDWARE:  # one step of Newton from the device's approximation
        return tl.inline_asm_elementwise(
            "{ .reg .f32 g, e, n; rcp.approx.ftz.f32 g, $1; neg.f32 n, $1; fma.rn.f32 e, n, g, 0f3F800000;"
            " fma.rn.f32 $0, e, g, g; }",
            "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.div_rn(constant_like(1.0, scale), scale)


@triton.jit
def quotient(x, scale, lift, HARDWARE: tl.constexpr):
    """Return x / scale, rounded as IEEE division does, for 16-bit x and scales of tiles of 16-bit numbers (tested).

    ``x`` is lifted. ``scale`` broadcasts: one number per tile.
    """
    scale = scale * lift
    inverse = reciprocal(scale, HARDWARE)
    residual = fma(_negate(scale), inverse, constant_like(1.0, scale), HARDWARE)
    down = (residual < 0.0).to(tl.int32)  # keeps rest ≥ 0, so that a negative zero stays negative
    inverse = (inverse.to(tl.int32, bitcast=True) - down).to(tl.float32, bitcast=True)
    residual = fma(_negate(scale), inverse, constant_like(1.0, scale), HARDWARE) * inverse
    return fma(x, inverse, x * residual, HARDWARE)


@triton.jit
def nearest_e2m1(y, HARDWARE: tl.constexpr):
    """Round FP32 y to E2M1, ties to even. A zero has no sign. Quotients of 16-bit numbers never round above 6.

    Adds and subtracts 1.5·2^23 times the local spacing, with the sign of y.
    """
    if HARDWARE:
        power = tl.inline_asm_elementwise(
            "max.xorsign.abs.f32 $0, $1, 0f3F800000;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        ).to(tl.int32, bitcast=True)
    else:
        bits = y.to(tl.int32, bitcast=True)
        power = tl.maximum(bits & 0x7FFFFFFF, 127 << 23) | (bits & _SIGN)
    power = (power & (_SIGN | INFINITY_BITS)).to(tl.float32, bitcast=True)
    magic = constant_like(1.5 * 2.0**22, y)
    return fma(power, _negate(magic), fma(power, magic, y, HARDWARE), HARDWARE)


@triton.jit
def e4m3_byte(value):
    """Return the E4M3 byte (int32) of an FP32 number that is exact in E4M3."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    subnormal = (tl.abs(value) * 512.0).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), subnormal, (magnitude >> 20) - (120 << 3))
    code = tl.where(magnitude > INFINITY_BITS, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _nearest_e4m3(y):
    """Saturate FP32 y and round it to E4M3, ties to even, for devices without the conversion instruction."""
    magnitude = tl.minimum(tl.abs(y), 448.0, propagate_nan=tl.PropagateNan.ALL)
    power = (tl.maximum(magnitude, 2.0**-6).to(tl.int32, bitcast=True) & INFINITY_BITS).to(tl.float32, bitcast=True)
    magic = constant_like(1.5 * 2.0**20, y)
    rounded = fma(power, _negate(magic), fma(power, magic, magnitude, False), False)
    return (rounded.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_bytes(lo, hi, JOIN: tl.constexpr, HARDWARE: tl.constexpr):
    """Round FP32 pairs to E4M3, to nearest, saturated: two tensors of uint8 or, with ``JOIN``, int16 words, twice."""
    if HARDWARE:
        if JOIN:
            words = tl.inline_asm_elementwise(
                "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1;"
                " cvt.rn.satfinite.e4m3x2.f32 b, $4, $2; mov.b32 $0, {a, b}; }",
                "=r,f,f,f,f", [lo, hi], dtype=tl.int16, is_pure=True, pack=2,
            )  # fmt: skip
            return words, words
        else:
            return lo.to(tl.float8e4nv).to(tl.uint8, bitcast=True), hi.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return join_bytes(e4m3_byte(_nearest_e4m3(lo)), e4m3_byte(_nearest_e4m3(hi)), JOIN)


@triton.jit
def join_bytes(lo, hi, JOIN: tl.constexpr):
    if JOIN:
        words = (lo | (hi << 8)).to(tl.int16)
        return words, words
    else:
        return lo.to(tl.uint8), hi.to(tl.uint8)


# -- parts of a matrix -----------------------------------------------------------------------------------------------
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
def broadcast_over_rows(vector, DOWN: tl.constexpr):
    """Expand a vector of columns so that it broadcasts over rows."""
    return vector[None, :, None] if DOWN else vector[None, :]


@triton.jit
def load_pairs(x_ptr, x_stride, M, width, m, k, DOWN: tl.constexpr):
    """Load part (m, k) as int32 words of two bf16 numbers, zero outside the matrix: [128, 64] or, with ``DOWN``,
    [64, 64, 2]. ``x_stride`` and ``width`` count words.
    """
    i, j = _rows(DOWN), broadcast_over_rows(tl.arange(0, PAIRS), DOWN)
    pointers = x_ptr + m.to(tl.int64) * EDGE * x_stride + k * PAIRS + i * x_stride + j
    if DOWN:  # hides contiguity, so that the compiler chooses the layout of the transposed store for this load
        pointers = tl.max_contiguous(pointers, [1, 1, 1])
    inside = (m * EDGE + i < M) & (k * PAIRS + j < width)
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def pair_values(words):
    """Return the even and the odd columns of pairs of bf16 numbers, in FP32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def lift_pairs(words, lo_lift, hi_lift, HARDWARE: tl.constexpr):
    """Return ``pair_values`` times powers of two (one per tile)."""
    if HARDWARE:  # one multiplication per pair
        lift = (lo_lift.to(tl.uint32, bitcast=True) >> 16) | hi_lift.to(tl.uint32, bitcast=True)
        words = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [words, lift], dtype=tl.int32, is_pure=True, pack=1
        )
        return pair_values(words)
    else:
        lo, hi = pair_values(words)
        return lo * lo_lift, hi * hi_lift


@triton.jit
def _max_bf16(a, b):  # maximum of the magnitudes, NaN above all; the sign of the result has no meaning
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _largest(x, DOWN: tl.constexpr, WORDS: tl.constexpr):
    """Return the maximum of each column (``DOWN``) or row: of integers, or of two bf16 numbers per word (``WORDS``)."""
    last: tl.constexpr = 2 if DOWN else 1
    if WORDS:
        x = tl.reduce(x, last, _max_bf16)
        return tl.reduce(x, 0, _max_bf16) if DOWN else x
    else:
        x = tl.max(x, axis=last)
        return tl.max(x, axis=0) if DOWN else x


@triton.jit
def amax_pairs(words, DOWN: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the FP32 bits of max|x| of each column (``DOWN``) or row, separately for even and odd columns."""
    if HARDWARE:
        pairs = _largest(words, DOWN, True) & 0x7FFF7FFF
        return (pairs & 0xFFFF) << 16, (pairs >> 16) << 16
    else:
        lo, hi = pair_values(words)
        return _largest(magnitude_bits(lo), DOWN, False), _largest(magnitude_bits(hi), DOWN, False)


@triton.jit
def raise_amax(amax_ptr, amax):
    """Raise the stored bits of an amax to ``amax``."""
    # Few programs have a larger number than the stored one, and atomic operations on one address run one by one.
    tl.atomic_max(amax_ptr, amax, mask=amax > tl.load(amax_ptr, cache_modifier=".cg"))


@triton.jit
def store_rows(ptr, words, m, k, stride, row_mask):
    """Store pairs [128, 64] to part (m, k) of a matrix whose width is padded to 128; ``stride`` counts pairs."""
    i, j = tl.arange(0, EDGE), tl.arange(0, PAIRS)
    base = ptr + m.to(tl.int64) * EDGE * stride + k * PAIRS
    tl.store(base + i[:, None] * stride + j[None, :], words, mask=row_mask[:, None])


@triton.jit
def store_columns(ptr, lo, hi, m, k, stride, lo_mask, hi_mask):
    """Store bytes [64, 64, 2] of the even and odd columns of part (m, k) to rows of the transposed matrix."""
    j = broadcast_over_rows(tl.arange(0, PAIRS), True)
    base = ptr + k.to(tl.int64) * EDGE * stride + m * EDGE
    base = base + 2 * j * stride + _rows(True)
    tl.store(base, lo, mask=broadcast_over_rows(lo_mask, True))
    tl.store(base + stride, hi, mask=broadcast_over_rows(hi_mask, True))


# -- stochastic rounding ---------------------------------------------------------------------------------------------
@triton.jit
def mix32(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def compute_once(keys):
    """Compute the keys once and share them. The compiler would compute them again in every thread."""
    return tl.gather(keys.to(tl.int32, bitcast=True), tl.arange(0, keys.shape[0]), 0).to(tl.uint32, bitcast=True)


@triton.jit
def _draw_words(row_words, cols, word, HALVES: tl.constexpr):
    """Return uint32 of rows by columns: one word for columns 2i and 2i + 1. The word is the draw of column 2i + 1."""
    factor = mix32((cols.to(tl.uint32) >> 1) * 0x85EBCA77 + word.to(tl.uint32)) | 1
    if not HALVES:  # a thread has many columns
        factor = compute_once(factor)
    factor = broadcast_over_rows(factor, HALVES)
    h = row_words * factor
    return ((h << 16) | (h >> 16)) * 0x9E3779B1 + factor


@triton.jit
def _even_draw(words):
    return words * 0xADB4A92D


@triton.jit
def _column_draw(words, cols, HALVES: tl.constexpr):
    """Return the draws of columns that need not be pairs."""
    return tl.where(broadcast_over_rows((cols & 1) == 0, HALVES), _even_draw(words), words)


@triton.jit
def pair_draws(rows, lo_cols, hi_cols, row_word, col_word, HALVES: tl.constexpr, PAIRED: tl.constexpr):
    """Return two uint32 tensors of draws [128, 64], or [64, 64, 2] with the halves of the rows last if ``HALVES``.

    Words are ``rounding.key_words``. ``PAIRED``: each (lo_cols, hi_cols) is some (2i, 2i + 1): one hash serves both.
    """
    row_words = mix32(rows.to(tl.uint32) * 0x9E3779B1 + row_word.to(tl.uint32))
    if HALVES:  # a thread has many rows
        row_words = tl.trans(tl.reshape(compute_once(row_words), (2, rows.shape[0] // 2)))
    row_words = tl.expand_dims(row_words, 1)
    lo = _draw_words(row_words, lo_cols, col_word, HALVES)
    if PAIRED:
        return _even_draw(lo), lo
    else:
        hi = _draw_words(row_words, hi_cols, col_word, HALVES)
        return _column_draw(lo, lo_cols, HALVES), _column_draw(hi, hi_cols, HALVES)


@triton.jit
def _stochastic_byte(y, bits):
    """Round y to E2M1 stochastically, as :func:`_round_e2m1` does, and return its E4M3 byte (int32)."""
    magnitude = tl.abs(y)
    below = (magnitude * 8388608.0).to(tl.int32)
    index = tl.where(magnitude < 1.0, below, magnitude.to(tl.int32, bitcast=True) - (126 << 23))
    index = (index + (bits >> 10).to(tl.int32, bitcast=True)) >> 22
    return tl.where(index < 2, 0x30 * index, 0x30 + 4 * tl.minimum(index, 7))


@triton.jit
def _round_e2m1(x, inverse, bits, back):
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
def shrink_if_subnormal(inverse, scale):
    """Return ``inverse``, less 2^-12 if its scale is subnormal, whose few bits could let a number exceed 6."""
    return tl.where(scale < 1.1754943508222875e-38, inverse * 0.999755859375, inverse)  # 2^-126; 1 − 2^-12


@triton.jit
def stochastic_bytes(
    words, lo, hi, lo_scale, hi_scale, lo_lift, hi_lift, lo_bits, hi_bits,
    JOIN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Multiply lifted FP32 pairs by the reciprocals of their scales, round to E2M1 stochastically, and return E4M3
    bytes. Bits 15 and 31 of ``words`` hold the signs.
    """
    lo_inverse = shrink_if_subnormal(reciprocal(lo_scale * lo_lift, HARDWARE), lo_scale)
    hi_inverse = shrink_if_subnormal(reciprocal(hi_scale * hi_lift, HARDWARE), hi_scale)
    if HARDWARE:
        lo_back = tl.where(lo_scale != lo_scale, float("nan"), 8.507059173023462e37)  # 2^126
        hi_back = tl.where(hi_scale != hi_scale, float("nan"), 8.507059173023462e37)
        lo = _round_e2m1(lo, lo_inverse * 1.1754943508222875e-38, lo_bits, lo_back)
        hi = _round_e2m1(hi, hi_inverse * 1.1754943508222875e-38, hi_bits, hi_back)
        return e4m3_bytes(lo, hi, JOIN, HARDWARE)
    else:
        lo = _stochastic_byte(lo * lo_inverse, lo_bits)
        hi = _stochastic_byte(hi * hi_inverse, hi_bits)
        lo = lo | ((words >> 8) & 0x80) | tl.where(lo_scale != lo_scale, 0x7F, 0)
        hi = hi | ((words >> 24) & 0x80) | tl.where(hi_scale != hi_scale, 0x7F, 0)
        return join_bytes(lo, hi, JOIN)
