"""The checkpoint's state: figures on their way survive it; anything else there is a SnipError."""

import json
from typing import Any

import pytest

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.state import BudgetSpent, ControllerState, Goal

FULL = ControllerState(
    grad_norm=1.5,
    guard=GuardState((3.0, 2.5), 18, strikes=1, bar=0.5, good=PrecisionMap({}, objective=0.5)),
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
        ("guard", {"losses": "x"}, "guard.losses: must be an array"),
        ("guard", {"good": 3}, "guard.good: schema: must be"),
        ("guard", {"other": 3}, "guard: unknown key 'other'"),
        ("in_flight", {"broken": 1}, "in_flight.broken: must be true or false"),
        ("spent", {"shares": -1.0}, "spent.shares: must be 0 or more"),
    ],
)
def test_damage_is_one_line(part: str, change: dict[str, Any], words: str) -> None:
    body = json.loads(FULL.to_bytes())
    body[part] |= change
    with pytest.raises(SnipError, match=rf"^SNIP state in the checkpoint: state.{words}") as caught:
        ControllerState.from_bytes(json.dumps(body).encode())
    assert "\n" not in str(caught.value)
