"""The checkpoint's state: figures on their way survive it."""

import json

from snip_megatron.precision import PrecisionMap
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.state import BudgetSpent, ControllerState

FULL = ControllerState(
    grad_norm=1.5,
    guard=GuardState((3.0, 2.5), 18, strikes=1, bar=0.5, good=PrecisionMap({}, objective=0.5)),
    alarm=Alarm(7, "a spike", 6.0, 5.0),
    in_flight=StepFigures(6, 3.0, 0.5, broken=True),
    spent=BudgetSpent(0, 7, 3.5, 6.0, 20),
)


def test_a_state_survives_json() -> None:
    assert ControllerState.from_bytes(FULL.to_bytes()) == FULL


def test_what_earlier_commits_stored_too_is_left_out() -> None:
    body = {**json.loads(FULL.to_bytes()), "goal": {"budget": "fp4=0.5", "schedule": "static"}}
    body["in_flight"]["answered"] = True
    assert ControllerState.from_bytes(json.dumps(body).encode()) == FULL
