"""The checkpoint's state: figures on their way survive it; anything else there is a SnipError."""

from __future__ import annotations

import json
from typing import Any

import pytest

from snip_megatron.errors import SnipError
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.state import BudgetSpent, ControllerState, Goal
from snip_megatron.runtime.step_report import StepFigures

FULL = ControllerState(
    grad_norm=1.5,
    guard=GuardState((3.0, 2.5), 18, strikes=1, bar=0.5, good='{"schema": "snip.map/1", "choices": {}}'),
    alarm=Alarm(7, "a spike", 6.0, 5.0),
    in_flight=StepFigures(6, 3.0, 0.5, broken=True, answered=True),
    spent=BudgetSpent(0, 7, 3.5, 6.0, 20),
    goal=Goal("fp4=0.5", "static"),
)


def test_every_part_is_the_same_afterwards() -> None:
    assert ControllerState.from_bytes(FULL.to_bytes()) == FULL


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("guard", {"losses": "x"}, "guard.losses: must be a list of finite numbers"),
        ("guard", {"losses": [float("nan")]}, "guard.losses"),
        ("guard", {"probation": -1}, r"guard.probation: must be an integer in \[0, 2\^31\)"),
        ("guard", {"bar": float("inf")}, "guard.bar: must be a finite number"),
        ("guard", {"good": 3}, "guard.good: must be a text"),
        ("in_flight", {"broken": 1}, "in_flight.broken: must be true or false"),
        ("alarm", {"reason": 1}, "alarm.reason: must be a text"),
        ("ledger", {"shares": -1.0}, "ledger.shares: must be 0 or more"),
        ("goal", {"budget": 1}, "goal.budget: must be a text"),
    ],
)
def test_damage_is_one_line(part: str, change: dict[str, Any], words: str) -> None:
    body = json.loads(FULL.to_bytes())
    body[part] |= change
    with pytest.raises(SnipError, match=rf"^SNIP state in the checkpoint: {words}") as caught:
        ControllerState.from_bytes(json.dumps(body).encode())
    assert "\n" not in str(caught.value)


def test_a_part_that_is_no_object_is_refused() -> None:
    body = json.loads(FULL.to_bytes()) | {"alarm": [3]}
    with pytest.raises(SnipError, match="alarm: must be an object"):
        ControllerState.from_bytes(json.dumps(body).encode())
