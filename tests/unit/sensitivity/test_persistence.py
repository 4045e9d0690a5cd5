"""Weights of the carried loss over a run, and the constants against the runs that they come from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from snip_megatron.errors import SnipError
from snip_megatron.sensitivity.phased import FORGETTING, STANDING_SHARE, STANDING_WEIGHTS, carried_weights

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
    whole = carried_weights(0, (0, 500, 750, 900), 1000, COSINE, 2.0)
    assert carried_weights(0, (500, 750, 900), 1000, COSINE, 2.0) == pytest.approx(whole[1:], rel=1e-12)
    cut = carried_weights(0, (600, 750, 900), 1000, COSINE, 2.0)
    assert cut[0] < whole[1]
    assert cut[1:] == pytest.approx(whole[2:], rel=1e-6)


def test_forgetting_repairs_the_early_steps_most() -> None:
    without = np.array(carried_weights(0, (0, 500), 1000, COSINE))
    repaired = np.array(carried_weights(0, (0, 500), 1000, COSINE, 3.0)) / without
    assert repaired[0] < repaired[1] < 1
    # With r the part of the learning rate that is left, ∫ exp(−f·r) dr over the run.
    assert sum(carried_weights(0, (0, 500), 1000, COSINE, 3.0)) == pytest.approx((1 - math.exp(-3.0)) / 3.0, rel=1e-5)


@pytest.mark.parametrize(
    ("begins", "end", "rates", "message"),
    [
        ((), 10, [1.0], "must ascend within the run"),
        ((5, 3), 10, [1.0], "must ascend within the run"),
        ((5, 12), 10, [1.0], "must ascend within the run"),
        ((0,), 10, [], "must be finite numbers"),
        ((0,), 10, [1.0, float("nan")], "must be finite numbers"),
        ((0,), 10, [0.0, 0.0], "one of the run must be above 0"),
    ],
)
def test_refused(begins: tuple[int, ...], end: int, rates: list[float], message: str) -> None:
    with pytest.raises(SnipError, match=message):
        carried_weights(0, begins, end, rates)


# Gaps of validation loss to bf16 in the map's own formats, 26 M parameters, cosine to the end: (steps; all fp4; fprop
# fp4 for a part of the steps, then fp8, backward always fp4; that part). The backward alone: .0013.
RUNS = ((500, 0.01077, 0.00225, 0.9), (500, 0.01077, 0.00254, 0.7), (1000, 0.0138, 0.0044, 0.9))
BACKWARD = 0.0013


def carried_part(standing: float, forgetting: float, part: float) -> float:
    weight = carried_weights(0, (0, round(part * 1000)), 1000, COSINE, forgetting)[0]
    return (1 - standing) * weight


def squares(standing: float, forgetting: float) -> float:
    misses = [
        (late - BACKWARD) - (all_fp4 - BACKWARD) * carried_part(standing, forgetting, part)
        for _, all_fp4, late, part in RUNS
    ]
    return float(np.square(misses).sum())


def test_the_standing_share_is_near_the_best_fit_and_the_runs_leave_forgetting_open() -> None:
    best = {f: min((squares(s / 100, f), s / 100) for s in range(100)) for f in (0.0, 1.0, 2.0, 10.0)}
    assert abs(best[FORGETTING][1] - STANDING_SHARE) < 0.05
    # Repair of the carried part and a smaller carried part look alike in these runs, up to a point.
    assert best[2.0][0] == pytest.approx(best[0.0][0], rel=0.1)
    assert best[10.0][0] > 2 * best[0.0][0]


# The same in bf16, from two comparisons: (all fp4 in its own formats; in bf16; fprop fp4 for a part of the steps, then
# fp8, backward always fp4, in bf16; that part).
IN_BF16 = ((0.01077, 0.00293, 0.00190, 0.9), (0.00956, 0.00399, 0.00230, 0.85))


def test_deployed_in_bf16_a_small_part_of_the_standing_loss_counts() -> None:
    """What a precise end takes away in bf16, in units of the standing loss."""
    taken = [(all_fp4 - late) / (STANDING_SHARE * own) for own, all_fp4, late, _ in IN_BF16]
    left = [carried_weights(0, (round(1000 * part),), 1000, COSINE)[0] for *_, part in IN_BF16]
    carried = [(1 - STANDING_SHARE) * weight for weight in left]
    weights = [one - other / STANDING_SHARE for one, other in zip(taken, carried, strict=True)]
    assert min(weights) - 0.03 < STANDING_WEIGHTS["bf16"] < max(weights) + 0.03
    assert STANDING_WEIGHTS["map"] == 1.0
