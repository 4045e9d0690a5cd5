"""The controller starts updates when gradients drift; one real rank, scripted answers."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_controller import LATE, Run, Script, ready

from snip_megatron.precision import Format
from snip_megatron.runtime.state import ControllerState

pytestmark = pytest.mark.usefixtures("one_rank")


TRIGGER = {"first_update": 2, "update_interval": 1000, "lag": 2, "trigger": 0.2}


def changing(step: int) -> list[float]:
    """One of four linears' gradients grow after step 60."""
    return [1.0, 1.0, 1.0, 1.0 if step <= 60 else 16.0]


def test_gradients_under_the_map_before_are_not_compared_with() -> None:
    """The map of step 11 is adopted when the gradients of step 10 are still on their way."""
    run = Run(Script({1: [ready(1)]}), **TRIGGER | {"first_update": 9})
    run.steps(0, 60, gradients=lambda step: [1.0, 1.0, 1.0, 100.0 if step <= 10 else 1.0])
    assert run.script.of("adopt") == [11]
    assert run.script.of("trigger") == []


def test_no_second_update_while_one_is_on_its_way() -> None:
    run = Run(Script({1: [ready(1)], 2: [LATE] * 20 + [ready(2)]}), **TRIGGER)
    run.steps(0, 110, gradients=lambda step: [1.0, 1.0, 1.0, 10.0 ** (step // 10)])
    assert len(run.script.of("trigger")) == 1
    assert len(run.script.submitted) == 2


@pytest.mark.parametrize("cut", [61, 71, 72, 74])
def test_a_run_resumed_at_any_step_is_triggered_alike(cut: int) -> None:
    def script() -> Script:
        return Script({1: [ready(1)], 2: [ready(2, Format.FP8)]})

    whole = Run(script(), **TRIGGER)
    whole.steps(0, cut, gradients=changing)
    saved = whole.controller.state_to_save()
    before = len(whole.script.events)
    whole.steps(cut, 110, gradients=changing)
    resumed = Run(script(), restored=ControllerState.from_bytes(saved), **TRIGGER)
    resumed.steps(cut, 110, gradients=changing)

    def told(events: list[tuple[int, str, dict[str, Any]]]) -> list[tuple[int, str, Any]]:
        return [(s, kind, fields.get("drift")) for s, kind, fields in events if kind in ("trigger", "submit")]

    assert told(resumed.script.events) == told(whole.script.events[before:])
    assert resumed.controller.state_to_save() == whole.controller.state_to_save()
    assert [resumed.formats[s] for s in range(cut, 110)] == [whole.formats[s] for s in range(cut, 110)]
