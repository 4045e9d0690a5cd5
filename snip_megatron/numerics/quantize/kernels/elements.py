# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code for numbers: scales, IEEE quotients, rounding to E4M3 and E2M1.

Results equal those of ``rounding.py`` and ``reference.py``. Values come in pairs (``lo``, ``hi``): an even and an odd
column of one matrix, which share a 32-bit word if the matrix has 16-bit numbers. Code and instructions depend on the
device, results do not: with ``HARDWARE`` it uses Hopper's instructions on pairs, otherwise it builds bytes from the
bits of FP32. The interpreter takes the second path, because it runs no assembly and its own conversion to E4M3 does not
round to even.
"""

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def fma(a, b, c, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.fma(a, b, c)
    else:  # the interpreter's fma rounds the product; in float64 the product is exact
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


@triton.jit
def constant(value: tl.constexpr, x):
    """Return ``value`` in the shape of ``x``: no instruction on a GPU, a tensor for the interpreter."""
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def _negated(x):
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
        scale = tl.div_rn(amax, constant(maximum, amax))
    else:  # equals the division for every magnitude of a 16-bit dtype, subnormal quotients included (tested)
        scale = amax * inverse
        residual = fma(scale, constant(maximum, amax), _negated(amax), HARDWARE)
        scale = fma(_negated(residual), constant(inverse, amax), scale, HARDWARE)
    scale = tl.where(amax_bits >= INFINITY_BITS, float("nan"), scale)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def lift_of(scale):
    """Return the power of two that brings ``scale`` to [0.5, 1). A subnormal scale comes out smaller, NaN gives any
    value.
    """
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
        return tl.div_rn(constant(1.0, scale), scale)


@triton.jit
def quotient(x, scale, lift, HARDWARE: tl.constexpr):
    """Return x / scale, rounded as IEEE division does, for 16-bit x and scales of tiles of 16-bit numbers (tested).

    ``x`` is lifted. ``scale`` broadcasts: one number per tile.
    """
    scale = scale * lift
    inverse = reciprocal(scale, HARDWARE)
    rest = fma(_negated(scale), inverse, constant(1.0, scale), HARDWARE)
    down = (rest < 0.0).to(tl.int32)  # keeps rest ≥ 0, so that a negative zero stays negative
    inverse = (inverse.to(tl.int32, bitcast=True) - down).to(tl.float32, bitcast=True)
    rest = fma(_negated(scale), inverse, constant(1.0, scale), HARDWARE) * inverse
    return fma(x, inverse, x * rest, HARDWARE)


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
    magic = constant(1.5 * 2.0**22, y)
    return fma(power, _negated(magic), fma(power, magic, y, HARDWARE), HARDWARE)


@triton.jit
def byte_of(value):
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
    magic = constant(1.5 * 2.0**20, y)
    rounded = fma(power, _negated(magic), fma(power, magic, magnitude, False), False)
    return (rounded.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def bytes_of(lo, hi, JOIN: tl.constexpr, HARDWARE: tl.constexpr):
    """Round FP32 pairs to E4M3 bytes, to nearest, saturated.

    With ``JOIN`` returns int16 words (hi · 256 + lo), twice; otherwise two tensors of uint8.
    """
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
        return joined(byte_of(_nearest_e4m3(lo)), byte_of(_nearest_e4m3(hi)), JOIN)


@triton.jit
def joined(lo, hi, JOIN: tl.constexpr):
    if JOIN:
        words = (lo | (hi << 8)).to(tl.int16)
        return words, words
    else:
        return lo.to(tl.uint8), hi.to(tl.uint8)
