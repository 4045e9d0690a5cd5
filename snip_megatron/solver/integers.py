"""From float64 to the integers of CP-SAT, without losing order or feasibility.

CP-SAT adds int64 coefficients. A float64 is an integer times a power of two: a constraint whose numbers fit, after
their common divisor is taken out, is translated exactly. Others are rounded at 2^-bits of their sum, to the side that
loses no feasible choice; the caller checks the result against the true numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

BITS = 60
"""Sums of coefficients stay below 2^60: CP-SAT asks for sums within int64 with room for its own arithmetic."""
QUICK_BITS = 46
"""With needs of 60 bits CP-SAT was seen to take 3 to 10 times as long (its LP works in float64); with losses of 60
bits it was not."""


Exact = float | Fraction
"""A number whose value is taken exactly."""


@dataclass(frozen=True)
class IntegerNeed:
    """Σ coefficients·x ≥ ``need`` in integers. ``exact``: it holds exactly where the true constraint does."""

    coefficients: list[int]
    need: int
    exact: bool


def integer_need(
    savings: Sequence[Exact], need: Exact, fixed: Sequence[Exact] = (), *, bits: int = BITS, strict: bool = False
) -> IntegerNeed:
    """Σ savings·x ≥ need − Σ fixed.

    Args:
        savings: coefficient of each Boolean.
        need: finite. fixed: savings that are decided already.
        bits: the coefficients' sum stays below 2^bits.
        strict: where rounding is needed, round so that whatever meets the integers meets the floats; the default is
            the other side: whatever meets the floats meets the integers.
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
    # A need beyond what the sum can be, either way, is as good as one step beyond.
    return IntegerNeed(coefficients, max(-size - 1, min(size + 1, missing)), exact)


def integer_losses(losses: Sequence[float]) -> tuple[list[int], int]:
    """Losses ≥ 0 as integers, rounded down, and the exponent e of their unit 2^e.

    Rounding down keeps an integer lower bound a true one. The unit is a power of two, so that losses which are exact
    in it (whole numbers, equal values) stay so.
    """
    total = math.fsum(losses)
    if total <= 0:
        return [0] * len(losses), 0
    exponent = math.frexp(total)[1] - BITS
    return [math.floor(math.ldexp(x, -exponent)) for x in losses], exponent


def _common_unit(values: Sequence[Exact]) -> tuple[list[int], Fraction]:
    """The values as exact integer multiples of one unit fraction; of floats alone its denominator is a power of two."""
    ratios = [v.as_integer_ratio() for v in values]
    denominator = math.lcm(*(d for _, d in ratios))
    return [n * (denominator // d) for n, d in ratios], Fraction(1, denominator)
