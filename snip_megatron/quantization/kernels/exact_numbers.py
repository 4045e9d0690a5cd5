# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of the numbers of ``exact_programs.py``: scales of tiles, quotients, rounding, draws.

Tiles have the shape [row tiles, rows of a tile, column tiles, columns of a tile], where scales broadcast. Numbers are
magnitudes: rounding does not depend on the sign, which is restored when a number is stored. The code needs no
instruction that an Ampere GPU does not have.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.elements import (
    INFINITY_BITS,
    constant,
    fma,
    lift_of,
    magnitude_bits,
    newton_reciprocal,
)
from snip_megatron.quantization.kernels.stochastic import less_if_subnormal, mix32, once, truncated_product

_FINE = tl.constexpr(1024.0)  # a squared error in units of 2^-20 is the square of an error in units of 2^-10
_FOUR_STEPS = tl.constexpr(4 * 2.0**-9)  # of E4M3's smallest numbers
_SMALLEST_DIVISOR = tl.constexpr(2.0**-40)  # below every divisor of a tile that does not become zero


@triton.jit
def largest(tiles):
    """Return the largest integer of each tile of [row tiles, rows, column tiles, columns], with ones for the rest."""
    return tl.max(tl.max(tiles, axis=3, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def _reciprocal(x, GPU: tl.constexpr):
    """Return 1 / x to nearest, for normal x whose reciprocal is normal.

    One step of Newton from a number within one unit in the last place gives the nearest number, unless all bits of the
    mantissa of x are ones (P. Markstein, IBM J. Res. Dev. 34, 1990). The nearest number is odd then. (Tested for all
    mantissas: ``tests/unit/quantization/kernels/test_exact_numbers.py``.)
    """
    if GPU:
        found = newton_reciprocal(x)
        ones = ((x.to(tl.int32, bitcast=True) & 0x7FFFFF) + 1) >> 23
        return (found.to(tl.int32, bitcast=True) | ones).to(tl.float32, bitcast=True)
    else:
        return tl.div_rn(constant(1.0, x), x)


@triton.jit
def nearest(y, ELEMENT: tl.constexpr, UNIT: tl.constexpr, BOUNDED: tl.constexpr = False):
    """Saturate y ≥ 0 and round it to E2M1 (``ELEMENT`` 4) or E4M3 (8) in units of ``UNIT``, to nearest, ties to even.

    Subtracting y from 2^22 y (2^20 y for E4M3), and the result from that number, rounds: its last bit is the spacing of
    numbers near y. Where y is a tie, that bit is zero, so that the even number remains. Below 1.5 times the smallest
    normal number all spacings are equal. (Tested for all y: ``test_exact_numbers.py``.) ``BOUNDED``: no y is large
    enough to be rounded above the maximum.
    """
    maximum: tl.constexpr = (6.0 if ELEMENT == 4 else 448.0) * UNIT
    least: tl.constexpr = 1.5 * (1.0 if ELEMENT == 4 else 0.015625) * UNIT
    spacings: tl.constexpr = 2.0**22 if ELEMENT == 4 else 2.0**20
    if not BOUNDED:
        y = tl.minimum(y, maximum, propagate_nan=tl.PropagateNan.ALL)
    multiple = tl.maximum(y, least) * spacings  # exact, so that it may be part of an FMA
    return multiple - (multiple - y)


@triton.jit
def tensor_scale(amax, SCALING: tl.constexpr, FOUR: tl.constexpr):
    """Return the FP32 scale of a tensor, amax / 448, amax / (6·448) or, with ``FOUR``, amax / (6·256), as IEEE
    division; 1 if that is zero.
    """
    maximum: tl.constexpr = 448.0 if SCALING == "fp32_tensor" else 6.0 * (256.0 if FOUR else 448.0)
    scale = tl.div_rn(amax, constant(maximum, amax))
    scale = tl.where(scale == 0.0, 1.0, scale)
    if SCALING == "fp32_tensor":
        scale = tl.where(magnitude_bits(amax) >= INFINITY_BITS, float("nan"), scale)
    return scale


@triton.jit
def _over_maximum(amax, lift, MAXIMUM: tl.constexpr, SHORT: tl.constexpr, GPU: tl.constexpr):
    """Return amax / ``MAXIMUM`` as IEEE division, times a power of two. With ``SHORT`` amax is an even number of FP32's
    smallest numbers.
    """
    if SHORT and (MAXIMUM == 4.0):  # exact
        return amax * (lift * 0.25)
    elif SHORT and (MAXIMUM == 6.0):  # tested for all such numbers: test_exact_numbers.py
        inverse: tl.constexpr = 0.16666666666666666
        quotient = amax * inverse
        rest = fma(quotient, constant(-6.0, amax), amax, GPU)
        return fma(rest, constant(inverse, amax), quotient, GPU) * lift
    else:
        return tl.div_rn(amax, constant(MAXIMUM, amax)) * lift


@triton.jit
def _corrected_quotient(x, divisor, inverse, GPU: tl.constexpr):
    """Return x / divisor as IEEE division rounds it, from the rounded reciprocal of the divisor.

    The product is corrected once by its residual (P. Markstein, IBM J. Res. Dev. 34, 1990). Powers of two have brought
    both to where no residual underflows that matters.
    """
    divisor, inverse = divisor + tl.zeros_like(x), inverse + tl.zeros_like(x)
    quotient = x * inverse
    return fma(fma(-1.0 * quotient, divisor, x, GPU), inverse, quotient, GPU)


@triton.jit
def _e4m3_scale(amax_bits, whole, MAXIMUM: tl.constexpr, UNIT: tl.constexpr, SHORT: tl.constexpr, GPU: tl.constexpr):
    """Return (divisor of x, E4M3 scale) of finite tiles whose amax becomes ``MAXIMUM``.

    The divisor is multiplied by the power of two that brings ``whole``, the scale of the tensor, to [0.5, 1), and
    divided by ``UNIT``, so that quotients come in units of 1 / ``UNIT``. A tile whose scale is zero gets some divisor.
    """
    lift = lift_of(whole)
    lifted = whole * lift
    amax = tl.minimum(amax_bits.to(tl.float32, bitcast=True), whole * 1048576.0)  # larger ones saturate
    amax = _over_maximum(amax, lift, MAXIMUM, SHORT, GPU)
    ratio = _corrected_quotient(amax, lifted, tl.div_rn(constant(1.0, lifted), lifted), GPU)
    of_tile = nearest(ratio, 8, 1.0)
    divisor = tl.maximum(of_tile * whole * (lift * (1.0 / UNIT)), _SMALLEST_DIVISOR)
    return divisor, of_tile


@triton.jit
def scales(amax_bits, whole, ELEMENT: tl.constexpr, SCALING: tl.constexpr):
    """Return the factor of a value, for formats whose tiles have no E4M3 scale, from the bits of max|x| of tiles.

    ``whole`` is the scale of the tensor.
    """
    finite = amax_bits < INFINITY_BITS
    amax = amax_bits.to(tl.float32, bitcast=True)
    if SCALING == "fp32_tensor":
        return tl.zeros_like(amax) + whole
    elif SCALING == "e8m0":  # 2^(floor(log2 amax) − emax), at least 2^-127, which is subnormal
        exponent = tl.maximum((amax_bits >> 23) - (2 if ELEMENT == 4 else 8), 0)
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
        return tl.where(finite, tl.where(amax_bits == 0, 1.0, scale), float("nan"))
    else:
        scale = tl.div_rn(amax, constant(6.0 if ELEMENT == 4 else 448.0, amax))
        return tl.where(finite, tl.where(scale == 0.0, 1.0, scale), float("nan"))


@triton.jit
def inverse_power(scale):
    """Return 1 / scale of a power of two that is at least 2^-127. NaN gives any number."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.where(bits == 1 << 22, 254 << 23, (254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def _quotient(x, divisor, NARROW: tl.constexpr, GPU: tl.constexpr):
    """Return x / divisor of :func:`_e4m3_scale` as IEEE division rounds it.

    ``NARROW``: x and the amax of its tensor are 16-bit numbers. Two FP32 numbers then hold enough of the reciprocal for
    a quotient in two instructions. The last bit of the second is set for the divisor whose mantissa is all ones, whose
    reciprocal Newton's step may round down. (Tested for all such numbers: ``test_exact_numbers.py``.)
    """
    if NARROW:
        inverse = newton_reciprocal(divisor) if GPU else tl.div_rn(constant(1.0, divisor), divisor)
        rest = fma(-1.0 * divisor, inverse, constant(1.0, divisor), GPU)
        low = rest * inverse
        low = (fma(low, rest, low, GPU).to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
        return fma(x, inverse + tl.zeros_like(x), x * (low + tl.zeros_like(x)), GPU)
    else:
        return _corrected_quotient(x, divisor, _reciprocal(divisor, GPU), GPU)


@triton.jit
def _lifted_quotient(x, divisor, GPU: tl.constexpr):
    """Return x / divisor for any FP32 divisors."""
    lift = lift_of(divisor)
    lifted = divisor * lift
    return _corrected_quotient(x * lift, lifted, tl.div_rn(constant(1.0, lifted), lifted), GPU)


@triton.jit
def _or_nan(factor, amax_bits):
    return tl.where(amax_bits < INFINITY_BITS, factor, float("nan"))


@triton.jit
def rounded_to_nearest(x, amax_bits, whole, ELEMENT: tl.constexpr, SCALING: tl.constexpr, SHORT: tl.constexpr,
                       NARROW: tl.constexpr, GPU: tl.constexpr):  # fmt: skip
    """Return elements and factors of tiles of magnitudes, which are lifted if they have E4M3 scales."""
    if SCALING == "e4m3_fp32":
        divisor, factor = _e4m3_scale(amax_bits, whole, 6.0, 1.0, SHORT, GPU)
        y, factor = _quotient(x, divisor, NARROW, GPU), _or_nan(factor, amax_bits)
    else:
        factor = scales(amax_bits, whole, ELEMENT, SCALING)
        if SCALING == "e8m0":  # the product with the reciprocal of a power of two is the quotient
            y = x * inverse_power(factor)
        else:
            y = _lifted_quotient(x, factor, GPU)
    return nearest(y, ELEMENT, 1.0), factor


@triton.jit
def _candidate(x, amax_bits, whole, MAXIMUM: tl.constexpr, EXACT: tl.constexpr, SHORT: tl.constexpr,
               NARROW: tl.constexpr, GPU: tl.constexpr):  # fmt: skip
    """Return E2M1 values times 2^10, E4M3 scales and squared errors of tiles whose amax becomes ``MAXIMUM``.

    With ``EXACT`` the sum is one of integers, as in ``reference.py``: no order of additions changes it. Otherwise it is
    one of FP32 numbers, and values are not saturated.
    """
    divisor, factor = _e4m3_scale(amax_bits, whole, MAXIMUM, _FINE, SHORT, GPU)
    y = _quotient(x, divisor, NARROW, GPU)
    values = nearest(y, 4, _FINE, BOUNDED=not EXACT)
    error = values - y
    squares = error * error
    if EXACT:
        squares = squares.to(tl.int32)
    total = tl.sum(tl.sum(squares, axis=3, keep_dims=True), axis=1, keep_dims=True)
    return values, factor, total.to(tl.float32) * factor * factor


@triton.jit
def four_over_six(x, amax_bits, whole, EXACT: tl.constexpr, SHORT: tl.constexpr, NARROW: tl.constexpr,
                  GPU: tl.constexpr):  # fmt: skip
    """Return E2M1 values times 2^10 and E4M3 scales over 2^10 of lifted magnitudes, where the amax of a tile becomes 6
    or 4, by the smaller squared error; and 1 for tiles where they may be wrong without ``EXACT``.

    Errors in units of 2^-10 are 1024 at most, unless a scale is one of the three smallest or saturates. So a sum of 16
    squares is less than 2^24, where 16 additions in FP32 lose 8 at most, as the integers lose 16, and the products of
    the sum with the scale 2 each. Together this is less than 64.
    """
    values, factor, error = _candidate(x, amax_bits, whole, 6.0, EXACT, SHORT, NARROW, GPU)
    others, of_other, error_of_other = _candidate(x, amax_bits, whole, 4.0, EXACT, SHORT, NARROW, GPU)
    near = tl.abs(error_of_other - error) <= of_other * of_other * 64.0
    unsure = (near | (factor < _FOUR_STEPS) | (of_other == 448.0)) & (amax_bits != 0)
    smaller = (error_of_other < error) | (factor == 0.0)
    factor = _or_nan(tl.where(smaller, of_other, factor) * (1.0 / _FINE), amax_bits)
    return tl.where(smaller, others, values), factor, unsure.to(tl.int32)


@triton.jit
def any_bits(tiles):
    """Return the union of the bits of all integers of a tensor with four dimensions."""
    for _ in tl.static_range(4):
        tiles = tl.reduce(tiles, 0, _union)
    return tiles


@triton.jit
def _union(a, b):
    return a | b


@triton.jit
def rounded_stochastically(x, draw, amax_bits, whole, SCALING: tl.constexpr, SHORT: tl.constexpr, GPU: tl.constexpr):
    """Return E2M1 elements and factors of tiles of magnitudes, which are rounded as in ``rounding.py``.

    FP32 numbers 2^-126·y are counted by their bits, and the upper bits of the count are the E2M1 number, below 1, where
    they are subnormal, as above. So the draw is added to the 22 bits that follow. The product y is truncated.
    """
    if SCALING == "e4m3_fp32":
        divisor, factor = _e4m3_scale(amax_bits, whole, 6.0, 1.0, SHORT, GPU)
        inverse, factor = _reciprocal(divisor, GPU), _or_nan(factor, amax_bits)
        # Factors 2^-20 and 2^-106 instead of 2^-126 alone, so that no reciprocal is subnormal.
        x = x * (lift_of(whole) * 9.5367431640625e-07)
        inverse = less_if_subnormal(inverse, factor * whole) * 1.232595164407831e-32
    else:
        factor = scales(amax_bits, whole, 4, SCALING)
        if SCALING == "e8m0":
            x = x * inverse_power(factor)
            inverse = less_if_subnormal(constant(1.1754943508222875e-38, factor), factor)
        else:
            lift = lift_of(factor)
            lifted = factor * lift
            inverse = less_if_subnormal(tl.div_rn(constant(1.0, lifted), lifted), factor) * 1.1754943508222875e-38
            x = x * lift
    inverse = inverse + tl.zeros_like(x)
    if GPU:
        y = tl.inline_asm_elementwise(
            "mul.rz.f32 $0, $1, $2;", "=f,f,f", [x, inverse], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = truncated_product(x, inverse)
    count = y.to(tl.uint32, bitcast=True) + (draw >> 10)
    count = tl.minimum(count, 0x01FFFFFF) & 0xFFC00000  # at most 6, which NaN becomes too
    return count.to(tl.float32, bitcast=True) * 8.507059173023462e37, factor  # 2^126


@triton.jit
def draws(rows, cols, word_0, word_1):
    """Return uint32 draws [rows, cols] of global ids: the hash of ``rounding.py``.

    The last multiplication, which only even columns have, is distributed over the sum before it.
    """
    row_words = once(mix32(rows.to(tl.uint32) * 0x9E3779B1 + word_0.to(tl.uint32)))
    factor = mix32((cols.to(tl.uint32) >> 1) * 0x85EBCA77 + word_1.to(tl.uint32)) | 1
    even = (cols & 1) == 0
    last = tl.where(even, 0x9C8A3D1D, 0x9E3779B1)
    added = tl.where(even, factor * 0xADB4A92D, factor)
    h = row_words[:, None] * factor[None, :]
    return ((h << 16) | (h >> 16)) * last.to(tl.uint32)[None, :] + added[None, :]
