"""Arithmetic of ``exact_numbers.py`` for every mantissa: rounding, and divisions that take no division.

FMA is exact here, on any machine.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

Numbers = NDArray[np.float32]
_SIXTH = np.float32(1 / 6)


def fma(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """Return a·b + c, rounded once: the sum in FP64 is rounded to odd first (Boldo and Melquiond, 2008)."""
    product, added = a.astype(np.float64) * b, c.astype(np.float64)  # the product is exact
    total = product + added
    part = total - product
    error = (product - (total - part)) + (added - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where((error > 0) == (total > 0), 1, -1)
    odd = total.view(np.int64) + np.where((error != 0) & even, towards, 0)
    return odd.view(np.float64).astype(np.float32)


def sixth(amax: Numbers) -> Numbers:
    quotient = amax * _SIXTH
    rest = fma(quotient, np.full_like(amax, -6.0), amax)
    return fma(rest, np.full_like(amax, _SIXTH), quotient)


def numbers(first: int, last: int, step: int = 1) -> Numbers:
    return np.arange(first, last, step, dtype=np.int32).view(np.float32)


@pytest.mark.parametrize("first", range(0x3F800000, 0x40000000, 1 << 21))
def test_sixths_of_all_mantissas(first: int) -> None:
    amax = numbers(first, first + (1 << 21))
    assert np.array_equal(sixth(amax), amax / np.float32(6))


@pytest.mark.parametrize("first", range(0, 0x02000000, 1 << 23))
def test_sixths_that_are_subnormal(first: int) -> None:
    """Even multiples of the smallest number, which 16-bit numbers and their transforms of 16 points are. Odd ones,
    which may be ties, need a division.
    """
    amax = numbers(first, first + (1 << 23), 2)
    assert np.array_equal(sixth(amax), amax / np.float32(6))
    if first == 0:
        odd = numbers(first + 1, first + (1 << 20), 2)
        assert not np.array_equal(sixth(odd), odd / np.float32(6))


def test_reciprocals_of_all_mantissas() -> None:
    """From every number within one unit in the last place, as far as a hardware's approximation may be off."""
    wrong = []
    for first in range(0x3F000000, 0x3F800000, 1 << 21):
        divisor = numbers(first, first + (1 << 21))
        expected, inverse = np.float32(1) / divisor, 1 / divisor.astype(np.float64)
        for off in (-1, 0, 1):
            start = (expected.view(np.int32) + off).view(np.float32)
            rest = fma(-divisor, start, np.ones_like(divisor))
            found = fma(rest, start, start)
            ones = ((divisor.view(np.int32) & 0x7FFFFF) + 1) >> 23
            near = np.abs(start - inverse) <= 2.0**-23
            fixed = (found.view(np.int32) | ones).view(np.float32)
            assert np.array_equal(fixed[near], expected[near])
            wrong += list(divisor[near & (found != expected)])
    assert wrong == [np.float32(1 - 2.0**-24)]  # the mantissa of ones, without its correction


E4M3 = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
HALVES = {
    "bf16": ((np.arange(1, 0x7F80, dtype=np.int32) << 16).view(np.float32), 8),
    "fp16": (np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32), 11),
}


def mantissas(amax: Numbers) -> Numbers:
    """Return in [0.5, 1) those of the scales of tiles of nvfp4 and nvfp4_46 whose tensors have these amaxes."""
    found = []
    for largest in (6 * 448, 6 * 256):
        whole = amax / np.float32(largest)
        scales = whole[whole > 0][:, None] * E4M3
        found.append(np.unique(np.frexp(scales[(scales > 0) & np.isfinite(scales)])[0]))
    return np.unique(np.concatenate(found))


@pytest.mark.parametrize("dtype", HALVES)
def test_quotients_of_all_16_bit_numbers_by_all_scales(dtype: str) -> None:
    """From the nearest reciprocal, or from its neighbour where Newton's step finds that one."""
    amax, bits = HALVES[dtype]
    divisor = mantissas(amax)
    inverse = np.float32(1) / divisor
    ones = divisor == np.float32(1 - 2.0**-24)
    for start in (inverse, np.where(ones, np.float32(1), inverse)):
        rest = fma(-divisor, start, np.ones_like(divisor))
        low = (fma(rest * start, rest, rest * start).view(np.int32) | 1).view(np.float32)
        for x in np.arange(2 ** (bits - 1), 2**bits, dtype=np.float32) * np.float32(2.0**-bits):
            numerator = np.full_like(divisor, x)
            assert np.array_equal(fma(numerator, start, numerator * low), numerator / divisor)


def rounded(y: Numbers, maximum: float, smallest: float, spacings: int, unit: float) -> Numbers:
    y = np.minimum(y, np.float32(maximum * unit))
    multiple = np.maximum(y, np.float32(1.5 * smallest * unit)) * np.float32(2.0**spacings)
    return multiple - (multiple - y)


ELEMENTS = [
    pytest.param(ml_dtypes.float4_e2m1fn, 6.0, 1.0, 22, id="e2m1"),
    pytest.param(ml_dtypes.float8_e4m3fn, 448.0, 2.0**-6, 20, id="e4m3"),
]


def binades(maximum: float, smallest: float) -> range:
    """Return the exponents from those that become zero to one above the maximum."""
    return range(int(np.log2(smallest)) - 6, int(np.log2(maximum)) + 2)


@pytest.mark.parametrize(("element", "maximum", "smallest", "spacings"), ELEMENTS)
def test_numbers_of_all_mantissas_round_to_nearest(
    element: type, maximum: float, smallest: float, spacings: int
) -> None:
    """Against ml_dtypes, in every binade that an element has, below and above; the unit is a power of two."""
    for exponent in binades(maximum, smallest):
        first = (exponent + 127) << 23
        y = numbers(first, first + (1 << 23))
        expected = np.minimum(y, np.float32(maximum)).astype(element).astype(np.float32)
        assert np.array_equal(rounded(y, maximum, smallest, spacings, 1.0), expected)
        assert np.array_equal(rounded(y * np.float32(1024), maximum, smallest, spacings, 1024.0), expected * 1024)


@pytest.mark.parametrize(("element", "maximum", "smallest", "spacings"), ELEMENTS)
def test_numbers_of_all_exponents_round_to_nearest(
    element: type, maximum: float, smallest: float, spacings: int
) -> None:
    """Zero, subnormal numbers of FP32, infinity and NaN, and a sample of the rest."""
    y = np.concatenate([numbers(0, 1 << 12), numbers(1 << 12, 0x7F800000, 997), np.float32([np.inf])])
    expected = np.minimum(y, np.float32(maximum)).astype(element).astype(np.float32)
    assert np.array_equal(rounded(y, maximum, smallest, spacings, 1.0), expected)
    assert np.isnan(rounded(np.float32([np.nan]), maximum, smallest, spacings, 1.0)).all()
