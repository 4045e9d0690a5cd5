"""PhasedRequest: what it holds of a schedule, and what it refuses."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import Schedule, SchedulePhase
from snip_megatron.sensitivity.request import PhasedRequest

REQUEST = PhasedRequest(
    begins=(120, 400),
    steps=(280, 100),
    budgets=(None, 0.5),
    change=(None, ("*:fprop",)),
    standing=(0.0, 1.0),
    carried=(0.3, 0.4),
    spent_steps=120,
    spent=0.9,
)


def test_what_remains_of_a_schedule() -> None:
    phases = (
        SchedulePhase(0.0, Budget("fp4", 0.9)),
        SchedulePhase(0.25, Budget("speedup", 1.2), ("*:fprop",)),
        SchedulePhase(0.5, change=("*:wgrad",)),
        SchedulePhase(0.75),
    )
    seen: list[Sequence[int]] = []

    def carried(begins: Sequence[int]) -> list[float]:
        seen.append(begins)
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
    assert seen == [(40, 60, 85)]
    deployed_in_bf16 = PhasedRequest.of_schedule(Schedule(phases), (10, 110), 40, standing=0.15, **arguments)
    assert deployed_in_bf16 == replace(request, standing=(0.0, 0.0, 0.15))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": ()}, "at least one phase"),
        ({"begins": (1,)}, "phases.begins: must have one entry for each of the 2 phases"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SnipError, match=re.escape(message)):
        replace(REQUEST, **change)
