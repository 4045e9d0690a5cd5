"""The checkpoint's state: figures on their way survive it; anything else there is a SnipError."""

from __future__ import annotations

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
