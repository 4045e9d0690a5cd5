"""Converts float64 to CP-SAT's integers without losing order or feasibility.

CP-SAT adds int64 coefficients. A float64 is an integer times a power of two. A constraint is converted exactly if its
numbers fit into int64 after division by their common divisor. Otherwise its numbers are rounded to multiples of 2^-bits
of their sum, in the direction that loses no feasible choice. The caller checks the result against the original numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

BITS = 60
"""Sums of coefficients stay below 2^60, because CP-SAT needs room for its own arithmetic within int64."""
QUICK_BITS = 46
"""Bits of needs in the first attempt.

With needs of 60 bits CP-SAT took 3 to 10 times as long, because its LP works in float64. Losses of 60 bits had no such
effect.
"""


Exact = float | Fraction
"""A number whose exact value is used."""


@dataclass(frozen=True)
class IntegerNeed:
    """The constraint Σ coefficients·x ≥ ``need`` in integers.

    Attributes:
        coefficients: coefficient of each Boolean.
        need: the right-hand side.
        exact: whether the constraint is equivalent to the original one.
    """

    coefficients: list[int]
    need: int
    exact: bool


def integer_need(
    savings: Sequence[Exact], need: Exact, fixed: Sequence[Exact] = (), *, bits: int = BITS, strict: bool = False
) -> IntegerNeed:
    """Return Σ savings·x ≥ need − Σ fixed in integers.

    Args:
        savings: coefficient of each Boolean.
        need: a finite number.
        fixed: savings of choices that are already decided.
        bits: the sum of the coefficients stays below 2^bits.
        strict: the direction of rounding, if it is needed. If True, all choices that meet the integer constraint meet
            the original one. If False, all choices that meet the original constraint meet the integer one.
    """
    numerators, unit = _common_unit(savings)
    divisor = math.gcd(*numerators) or 1
    coefficients = [m // divisor for m in numerators]
    unit *= divisor
    size = sum(map(abs, coefficients))
    exact = size < 2**bits
    if not exact:
        coarse = 2 ** (size.bit_length() - bits + 1)
        coefficients = [m // coarse if strict else -(-m // coarse) for m in coefficients]
        unit *= coarse
        size = sum(map(abs, coefficients))
    decided, decided_unit = _common_unit(fixed)
    missing = math.ceil((Fraction(need) - sum(decided) * decided_unit) / unit)
    # A need outside the range of the sum is equivalent to one just outside the range.
    return IntegerNeed(coefficients, max(-size - 1, min(size + 1, missing)), exact)


def integer_losses(losses: Sequence[float]) -> tuple[list[int], int]:
    """Return losses ≥ 0 as integers, rounded down, and the exponent e of their unit 2^e.

    Because of rounding down, an integer lower bound is a true one. Because the unit is a power of two, losses that are
    multiples of it (whole numbers, equal values) stay exact.
    """
    total = math.fsum(losses)
    if total <= 0:
        return [0] * len(losses), 0
    exponent = math.frexp(total)[1] - BITS
    return [math.floor(math.ldexp(x, -exponent)) for x in losses], exponent


def _common_unit(values: Sequence[Exact]) -> tuple[list[int], Fraction]:
    """Return the values as integer multiples of one fraction, and the fraction.

    If all values are floats, its denominator is a power of two.
    """
    ratios = [v.as_integer_ratio() for v in values]
    denominator = math.lcm(*(d for _, d in ratios))
    return [n * (denominator // d) for n, d in ratios], Fraction(1, denominator)
