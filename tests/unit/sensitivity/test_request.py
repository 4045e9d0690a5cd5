"""Requests: the phases of a run that remain, and what an error costs in each."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import Schedule, SchedulePhase
from snip_megatron.sensitivity.request import PhasedRequest, carried_weights


def test_what_remains_of_a_schedule() -> None:
    phases = (
        SchedulePhase(0.0, Budget("fp4", 0.9)),
        SchedulePhase(0.25, Budget("speedup", 1.2), ("*:fprop",)),
        SchedulePhase(0.5, change=("*:wgrad",)),
        SchedulePhase(0.75),
    )
    calls: list[Sequence[int]] = []

    def carried(begins: Sequence[int]) -> list[float]:
        calls.append(begins)
        return [0.4, 0.2, 0.1]

    arguments: dict[str, Any] = {"carried": carried, "spent_steps": 20, "spent": 0.9}
    request = PhasedRequest.of_schedule(Schedule(phases), (10, 110), 40, standing=1.0, **arguments)
    assert request == PhasedRequest(
        begins=(40, 60, 85),
        steps=(20, 25, 25),
        budgets=(1.2, None, None),
        change=(("*:fprop",), ("*:wgrad",), None),
        standing=(0.0, 0.0, 1.0),
        carried=(0.4, 0.2, 0.1),
        spent_steps=20,
        spent=0.9,
    )
    assert calls == [(40, 60, 85)]
    deployed_in_bf16 = PhasedRequest.of_schedule(Schedule(phases), (10, 110), 40, standing=0.15, **arguments)
    assert deployed_in_bf16 == replace(request, standing=(0.0, 0.0, 0.15))


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
