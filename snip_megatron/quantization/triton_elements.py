# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code for numbers: scales, IEEE quotients, rounding to E4M3 and E2M1. Shared by ``triton_kernels.py``.

Numbers are those of ``rounding.py`` and ``reference.py``. Everything comes in pairs (``lo``, ``hi``): even and odd
columns of one matrix, as 16-bit numbers lie in 32-bit words. Two paths differ by device, not by result: ``HARDWARE``
uses Hopper's instructions on pairs, otherwise bytes are built from the bits of FP32 (the interpreter runs no assembly,
and its own conversion to E4M3 does not round to even).
"""

import triton
import triton.language as tl

_INFINITY_BITS = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)


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
def tile_scale(amax_bits, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, DIVIDE: tl.constexpr):
    """FP32 scale, amax / 448 or / 6 in IEEE division, from the bits of max|x|; NaN for NaN or Inf, 1 for zero."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    maximum: tl.constexpr = 448.0 if FORMAT == 8 else 6.0
    inverse: tl.constexpr = 0.002232142857142857 if FORMAT == 8 else 0.16666666666666666
    if DIVIDE:
        scale = tl.div_rn(amax, _constant(maximum, amax))
    else:  # the same for all magnitudes of 16-bit formats, FP32's subnormal quotients included (tested one by one)
        scale = amax * inverse
        residual = _fma(scale, _constant(maximum, amax), _negated(amax), HARDWARE)
        scale = _fma(_negated(residual), _constant(inverse, amax), scale, HARDWARE)
    scale = tl.where(amax_bits >= _INFINITY_BITS, float("nan"), scale)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def lift_of(scale):
    """The power of two that brings ``scale`` to [0.5, 1), a subnormal one to less; anything for NaN."""
    exponent = scale.to(tl.int32, bitcast=True) & _INFINITY_BITS
    return ((253 << 23) - exponent).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(scale, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """1 / scale to nearest for a lifted scale (tested for all that 16-bit numbers give)."""
    if HARDWARE and (DTYPE != "fp32"):
        return tl.inline_asm_elementwise(
            "{ .reg .f32 g, e, n; rcp.approx.ftz.f32 g, $1; neg.f32 n, $1; fma.rn.f32 e, n, g, 0f3F800000;"
            " fma.rn.f32 $0, e, g, g; }",
            "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.div_rn(_constant(1.0, scale), scale)


@triton.jit
def quotient(x, scale, lift, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """x / scale, rounded as IEEE division; ``x`` is lifted (fp32: not), ``scale`` broadcasts (one number a tile)."""
    if DTYPE == "fp32":
        return tl.div_rn(x, scale + tl.zeros_like(x))
    else:  # equal to the division for every 16-bit x and every scale that comes of them (README.md)
        scale = scale * lift
        inverse = reciprocal(scale, DTYPE, HARDWARE)
        rest = _fma(_negated(scale), inverse, _constant(1.0, scale), HARDWARE)
        down = (rest < 0.0).to(tl.int32)  # a rest ≥ 0, so that a negative zero stays one
        inverse = (inverse.to(tl.int32, bitcast=True) - down).to(tl.float32, bitcast=True)
        rest = _fma(_negated(scale), inverse, _constant(1.0, scale), HARDWARE) * inverse
        return _fma(x, inverse, x * rest, HARDWARE)


@triton.jit
def nearest_e2m1(y, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 y to E2M1's grid, ties to even, a zero without its sign: adds and subtracts 1.5·2^23 of the local spacing,
    with y's sign."""
    if DTYPE == "fp32":  # 16-bit numbers never exceed 6 by as much as rounds up
        y = tl.minimum(tl.maximum(y, -6.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL)
    if HARDWARE:
        power = tl.inline_asm_elementwise(
            "max.xorsign.abs.f32 $0, $1, 0f3F800000;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        ).to(tl.int32, bitcast=True)
    else:
        bits = y.to(tl.int32, bitcast=True)
        power = tl.maximum(bits & 0x7FFFFFFF, 127 << 23) | (bits & _SIGN)
    power = (power & (_SIGN | _INFINITY_BITS)).to(tl.float32, bitcast=True)
    magic = _constant(1.5 * 2.0**22, y)
    return _fma(power, _negated(magic), _fma(power, magic, y, HARDWARE), HARDWARE)


@triton.jit
def _byte(value):
    """The E4M3 byte (int32) of an FP32 number that E4M3 holds."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    subnormal = (tl.abs(value) * 512.0).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), subnormal, (magnitude >> 20) - (120 << 3))
    code = tl.where(magnitude > _INFINITY_BITS, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _nearest_e4m3(y):
    """FP32 y to E4M3's grid, saturated, ties to even, for devices without the conversion."""
    magnitude = tl.minimum(tl.abs(y), 448.0, propagate_nan=tl.PropagateNan.ALL)
    power = (tl.maximum(magnitude, 2.0**-6).to(tl.int32, bitcast=True) & _INFINITY_BITS).to(tl.float32, bitcast=True)
    magic = _constant(1.5 * 2.0**20, y)
    rounded = _fma(power, _negated(magic), _fma(power, magic, magnitude, False), False)
    return (rounded.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def bytes_of(lo, hi, JOIN: tl.constexpr, HARDWARE: tl.constexpr):
    """E4M3 bytes of FP32 pairs, to nearest, saturated: int16 (hi · 256 + lo), twice, if ``JOIN``, or two of uint8."""
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
        return joined(_byte(_nearest_e4m3(lo)), _byte(_nearest_e4m3(hi)), JOIN)


@triton.jit
def joined(lo, hi, JOIN: tl.constexpr):
    if JOIN:
        words = (lo | (hi << 8)).to(tl.int16)
        return words, words
    else:
        return lo.to(tl.uint8), hi.to(tl.uint8)


@triton.jit
def decode(codes, other, JOIN: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 pairs of E4M3 bytes (a NaN byte may read as 480: its tile's scale is NaN)."""
    if JOIN and HARDWARE:
        lo, hi = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 x, a;"
            " cvt.rn.f16x2.e4m3x2 y, b; mov.b32 {a, b}, x; cvt.f32.f16 $0, a; cvt.f32.f16 $2, b;"
            " mov.b32 {a, b}, y; cvt.f32.f16 $1, a; cvt.f32.f16 $3, b; }",
            "=f,=f,=f,=f,r", [codes], dtype=(tl.float32, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        if JOIN:
            other = ((codes >> 8) & 0xFF).to(tl.uint8)
            codes = (codes & 0xFF).to(tl.uint8)
        lo = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        hi = other.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return lo, hi
