"""What an error costs in each phase of a run. The phases that remain: runtime/test_schedule_state.py."""

import math

import numpy as np
import pytest

from snip_megatron.sensitivity.request import carried_weights

COSINE = [(1 + math.cos(math.pi * i / 200)) / 2 for i in range(201)]


def test_a_constant_rate_weighs_by_steps() -> None:
    for rates in ([3e-4], [1.0] * 7):
        weights = carried_weights(100, (100, 600, 850, 1000), 1100, rates)
        assert weights == pytest.approx((0.5, 0.25, 0.15, 0.1), rel=1e-12)


def test_a_falling_rate_weighs_by_its_integral() -> None:
    weights = carried_weights(0, (0, 500, 750, 900), 1000, COSINE)
    integral = [x + math.sin(math.pi * x) / math.pi for x in (0, 0.5, 0.75, 0.9, 1)]
    assert weights == pytest.approx(np.diff(integral), abs=1e-5)
    assert sum(weights) == pytest.approx(1.0, rel=1e-12)


def test_only_what_remains_is_weighed_and_the_whole_run_is_the_unit() -> None:
    whole = carried_weights(0, (0, 500, 750, 900), 1000, COSINE)
    assert carried_weights(0, (500, 750, 900), 1000, COSINE) == pytest.approx(whole[1:], rel=1e-12)
    cut = carried_weights(0, (600, 750, 900), 1000, COSINE)
    assert cut[0] < whole[1]
    assert cut[1:] == pytest.approx(whole[2:], rel=1e-6)
