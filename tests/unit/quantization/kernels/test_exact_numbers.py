"""Rounding to nearest of ``exact_programs.py`` for every mantissa."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

Numbers = NDArray[np.float32]


def numbers(first: int, last: int, step: int = 1) -> Numbers:
    return np.arange(first, last, step, dtype=np.int32).view(np.float32)


def rounded(y: Numbers, maximum: float, smallest: float, spacings: int) -> Numbers:
    y = np.minimum(y, np.float32(maximum))
    multiple = np.maximum(y, np.float32(1.5 * smallest)) * np.float32(2.0**spacings)
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
    """Against ml_dtypes, in every binade that an element has, below and above."""
    for exponent in binades(maximum, smallest):
        first = (exponent + 127) << 23
        y = numbers(first, first + (1 << 23))
        expected = np.minimum(y, np.float32(maximum)).astype(element).astype(np.float32)
        assert np.array_equal(rounded(y, maximum, smallest, spacings), expected)


@pytest.mark.parametrize(("element", "maximum", "smallest", "spacings"), ELEMENTS)
def test_numbers_of_all_exponents_round_to_nearest(
    element: type, maximum: float, smallest: float, spacings: int
) -> None:
    """Zero, subnormal numbers of FP32, infinity and NaN, and a sample of the rest."""
    y = np.concatenate([numbers(0, 1 << 12), numbers(1 << 12, 0x7F800000, 997), np.float32([np.inf])])
    expected = np.minimum(y, np.float32(maximum)).astype(element).astype(np.float32)
    assert np.array_equal(rounded(y, maximum, smallest, spacings), expected)
    assert np.isnan(rounded(np.float32([np.nan]), maximum, smallest, spacings)).all()
