"""The trigger: what counts as drift, what does not, and what a checkpoint keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from snip_megatron.runtime.trigger import SETTLE, Trigger

STEADY = (1.0, 4.0, 9.0)
LATER = 1000  # than any restart


def settled(threshold: float = 0.2, start: Sequence[float] = STEADY) -> Trigger:
    trigger = Trigger(threshold)
    trigger.restart(100)
    for _ in range(SETTLE):
        trigger.observe(LATER, start)
    return trigger


def test_steady_gradients_and_common_factors_start_nothing() -> None:
    trigger = settled(threshold=1e-9)
    for factor in (1.0, 0.5, 1e-6, 1e6):
        trigger.observe(LATER, [factor * s for s in STEADY])
        assert trigger.drift == pytest.approx(0.0, abs=1e-9)


def test_drift_is_the_coefficient_of_variation_of_norms() -> None:
    trigger = settled()
    for _ in range(60):  # the running average gets there
        trigger.observe(LATER, [4.0, 4.0, 9.0])
    ratios = [2.0, 1.0, 1.0]
    mean = sum(ratios) / 3
    assert trigger.drift == pytest.approx(math.sqrt(sum((r / mean - 1) ** 2 for r in ratios) / 3))
    reason = trigger.reason()
    assert reason is not None
    assert reason["since"] == 100
    assert reason["drift"] == trigger.drift
    assert "trigger=0.2" in reason["reason"]
    assert settled(threshold=0.5).reason() is None


def test_nothing_before_the_first_update_nor_before_it_has_settled() -> None:
    trigger = Trigger(1e-6)
    for squares in (STEADY, (100.0, 4.0, 9.0)):
        trigger.observe(LATER, squares)
        assert trigger.reason() is None
    trigger.restart(5)
    for k in range(SETTLE):
        trigger.observe(LATER, [10.0**k, 1.0, 1.0])
        assert trigger.reason() is None
    trigger.observe(LATER, [1.0, 10.0**SETTLE, 1.0])
    assert trigger.reason() is not None
    trigger.restart(50)
    assert trigger.reason() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_look_that_is_not_finite_does_not_count(bad: float) -> None:
    trigger, other = settled(), settled()
    trigger.observe(LATER, [1.0, bad, 9.0])
    assert trigger.state == other.state


def test_linears_without_gradient_are_left_out() -> None:
    trigger = settled(start=(0.0, 1.0, 1.0))
    trigger.observe(LATER, [5.0, 1.0, 1.0])
    assert trigger.drift == 0.0
    trigger.observe(LATER, [0.0, 0.0, 0.0])
    assert math.isfinite(trigger.drift)
