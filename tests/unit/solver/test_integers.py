"""Translation to integers: what is feasible stays feasible, what is ordered stays ordered."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.solver.integers import BITS, QUICK_BITS, integer_losses, integer_need

SAVINGS = st.one_of(st.floats(-1e18, 1e18), st.integers(-(10**18), 10**18).map(float), st.sampled_from([0.0, 1e-300]))


@st.composite
def needs(draw: st.DrawFn) -> tuple[list[float], float, list[float], list[bool]]:
    savings = draw(st.lists(SAVINGS, min_size=1, max_size=8))
    fixed = draw(st.lists(SAVINGS, max_size=3))
    chosen = draw(st.lists(st.booleans(), min_size=len(savings), max_size=len(savings)))
    exact_sum = sum(
        (Fraction(s) for s, on in zip(savings, chosen, strict=True) if on), sum(map(Fraction, fixed), Fraction())
    )
    near = st.sampled_from([0.0, 1e-16, -1e-16, 1.0, -1.0]).map(lambda d: float(exact_sum) * (1 + d) + d)
    return savings, draw(st.one_of(near, SAVINGS)), fixed, chosen


@given(needs(), st.sampled_from([QUICK_BITS, BITS]), st.booleans())
def test_rounding_keeps_to_its_side(case: tuple, bits: int, strict: bool) -> None:
    savings, need, fixed, chosen = case
    row = integer_need(savings, need, fixed, bits=bits, strict=strict)
    assert sum(map(abs, row.coefficients)) < 2 ** (bits + 1)
    on = [i for i, x in enumerate(chosen) if x]
    true = sum((Fraction(savings[i]) for i in on), sum(map(Fraction, fixed), Fraction())) >= Fraction(need)
    translated = sum(row.coefficients[i] for i in on) >= row.need
    if row.exact:
        assert translated == true
    elif strict:
        assert true or not translated
    else:
        assert translated or not true


def test_common_divisors_are_taken_out() -> None:
    row = integer_need([3e17, 6e17, 0.0], 8e17, [1e17])
    assert row.exact
    assert row.coefficients == [1, 2, 0]
    assert row.need == math.ceil(7 / 3)


LOSSES = st.lists(
    st.one_of(st.floats(0, 1e3), st.floats(-12, 3).map(lambda e: 10.0**e), st.integers(0, 99).map(float)),
    min_size=1,
    max_size=12,
)


@given(LOSSES)
def test_losses_keep_their_order_above_the_resolution(losses: list[float]) -> None:
    integers, exponent = integer_losses(losses)
    unit = Fraction(2) ** exponent
    assert sum(integers) < 2**BITS
    for loss, integer in zip(losses, integers, strict=True):
        assert 0 <= Fraction(loss) - integer * unit < unit
    # The promise of the contract: differences above 1e-15 of the largest are seen.
    assert unit <= Fraction(1e-15) * Fraction(max(losses)) or not any(losses)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_whole_numbers_are_exact(losses: list[int]) -> None:
    integers, exponent = integer_losses([float(x) for x in losses])
    assert [i * Fraction(2) ** exponent for i in integers] == losses
