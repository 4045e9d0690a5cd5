# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code for numbers: the hash, IEEE quotients, rounding to E4M3 and E2M1. Shared by ``triton_kernels.py``.

Numbers are those of ``rounding.py`` and ``reference.py``. Two paths differ by device, not by result: ``HARDWARE`` uses
the E4M3 conversion instruction (Hopper and later), otherwise bytes are built from the bits of FP32 (the interpreter's
own conversion does not round to even). Quotients are IEEE: ``CORRECTIONS`` > 0 refines x·(1/s) by that many residuals
instead of dividing, which is exact for 16-bit x (see README.md).
"""

import triton
import triton.language as tl

_INFINITY_BITS = tl.constexpr(0x7F800000)


# -- random bits: rounding.py's hash ---------------------------------------------------------------------------------
@triton.jit
def _mix32(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def random_bits(rows, cols, word, other_word, column_word):
    """uint32 [len(rows), len(cols)]; rows, cols: vectors of global ids; words: ``rounding.key_words`` of the seed."""
    first = _mix32(rows.to(tl.uint32) * 0x9E3779B1 + word.to(tl.uint32))
    second = _mix32(first ^ other_word.to(tl.uint32)) * 0xC2B2AE35  # here, so that an element's step is a multiply-add
    column = _mix32(cols.to(tl.uint32) * 0x85EBCA77 + column_word.to(tl.uint32))
    h = (first[:, None] ^ column[None, :]) * 0x85EBCA6B
    h = (h ^ (h >> 16)) * 0xC2B2AE35 + second[:, None]
    return (h ^ (h >> 15)) * 0x9E3779B1


# -- elements --------------------------------------------------------------------------------------------------------
@triton.jit
def _fma(a, b, c, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.fma(a, b, c)
    else:  # the interpreter rounds the product; float64 holds it exactly
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


@triton.jit
def _constant(value: tl.constexpr, x):
    """``value`` in the shape of ``x``: no instruction on a GPU, a tensor for the interpreter."""
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def _negated(x):
    return x * -1.0  # Triton's own minus is 0 − x: an addition, and the wrong zero


@triton.jit
def _reciprocal(x, HARDWARE: tl.constexpr):
    """1/x of a normal number to about half a unit in the last place."""
    if HARDWARE:
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.fma(tl.fma(_negated(x), guess, 1.0), guess, guess)
    else:
        return tl.div_rn(_constant(1.0, x), x)


@triton.jit
def tile_scale(amax_bits, FORMAT: tl.constexpr, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 scale, amax / 448 or / 6 in IEEE division, from the bits of max|x|; NaN for NaN or Inf, 1 for zero."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    maximum: tl.constexpr = 448.0 if FORMAT == 8 else 6.0
    inverse: tl.constexpr = 0.002232142857142857 if FORMAT == 8 else 0.16666666666666666
    if CORRECTIONS == 0:
        scale = tl.div_rn(amax, _constant(maximum, amax))
    else:  # the same for all magnitudes of 16-bit formats, FP32's subnormal quotients included (tested one by one)
        scale = amax * inverse
        residual = _fma(scale, _constant(maximum, amax), _negated(amax), HARDWARE)
        scale = _fma(_negated(residual), _constant(inverse, amax), scale, HARDWARE)
    scale = tl.where(amax_bits >= _INFINITY_BITS, float("nan"), scale)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _divide(x, scale, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr):
    """x / scale, rounded as IEEE division; ``scale`` broadcasts (one number a tile). Keeps the sign of a zero."""
    if CORRECTIONS == 0:
        return tl.div_rn(x, scale + tl.zeros_like(x))
    else:
        lift = tl.where(
            scale < 8.673617379884035e-19, 1.2676506002282294e30, 1.0
        )  # 2^-60, 2^100: no subnormal residual
        x = x * lift
        scale = scale * lift
        inverse = _reciprocal(scale, HARDWARE)
        quotient = x * inverse
        for _ in tl.static_range(CORRECTIONS):
            residual = _fma(quotient, scale, _negated(x), HARDWARE)
            quotient = _fma(_negated(residual), inverse, quotient, HARDWARE)
        return quotient


@triton.jit
def _power_below(y, MIN_EXPONENT: tl.constexpr):
    """2^e, the power of two at or below y ≥ 0, not below 2^MIN_EXPONENT; anything for NaN."""
    largest = tl.maximum(y, 2.0**MIN_EXPONENT)
    return (largest.to(tl.int32, bitcast=True) & _INFINITY_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _round_nearest(y, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, HARDWARE: tl.constexpr):
    """y ≥ 0 to the element's grid, ties to even, by adding and subtracting 1.5·2^23 of the local spacing."""
    power = _power_below(y, MIN_EXPONENT)
    magic = _constant(1.5 * 2.0 ** (23 - MANTISSA), y)
    return _fma(power, _negated(magic), _fma(power, magic, y, HARDWARE), HARDWARE)


@triton.jit
def _round_stochastic(y, bits, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, HARDWARE: tl.constexpr):
    """floor(y/step + u)·step for y ≥ 0."""
    power = _power_below(y, MIN_EXPONENT)
    draw = (bits.to(tl.int32, bitcast=True) >> (9 + MANTISSA)).to(tl.float32)
    uniform = draw * (2.0**-23) + 2.0 ** -(MANTISSA + 1)  # u in units of 2^e
    raised = _fma(uniform, power, y, HARDWARE)
    magic = _constant(1.5 * 2.0 ** (23 - MANTISSA), y)
    if HARDWARE:  # rounding the sum down drops everything below the spacing
        lifted = tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [power, magic, raised], dtype=tl.float32, is_pure=True, pack=1
        )
        return _fma(power, _negated(magic), lifted, HARDWARE)
    else:
        step = power * (2.0**-MANTISSA)
        return tl.floor(raised / step) * step


@triton.jit
def _pack_bits(value):
    """The E4M3 byte of an FP32 number that E4M3 holds."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    subnormal = (tl.abs(value) * 512.0).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), subnormal, (magnitude >> 20) - (120 << 3))
    code = tl.where(magnitude > _INFINITY_BITS, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode(
    x, scale, bits, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr
):
    """E4M3 bytes of x / scale rounded to ``FORMAT`` (8: E4M3, 4: E2M1). The sign of x stays, on zeros too."""
    y = _divide(x, scale, CORRECTIONS, HARDWARE)
    maximum: tl.constexpr = 448.0 if FORMAT == 8 else 6.0
    mantissa: tl.constexpr = 3 if FORMAT == 8 else 1
    min_exponent: tl.constexpr = -6 if FORMAT == 8 else 0
    instruction: tl.constexpr = HARDWARE and (FORMAT == 8) and (not STOCHASTIC)  # it rounds and saturates
    if not instruction:
        y = tl.minimum(tl.abs(y), maximum, propagate_nan=tl.PropagateNan.ALL)
        if STOCHASTIC:
            y = _round_stochastic(y, bits, mantissa, min_exponent, HARDWARE)
        else:
            y = _round_nearest(y, mantissa, min_exponent, HARDWARE)
        sign = x.to(tl.int32, bitcast=True) & -0x80000000
        y = (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _pack_bits(y)


@triton.jit
def decode(code):
    """FP32 of E4M3 bytes (a NaN byte may read as 480: its tile's scale is NaN)."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
