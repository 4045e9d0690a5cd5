"""The checkpoint's state: figures on their way survive it."""

import json

import pytest
from scripted_controller import Run, Script, planned

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.phases import AUTO
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.state import BudgetSpent, ControllerState, Timeline

pytestmark = pytest.mark.usefixtures("one_rank")

FULL = ControllerState(
    grad_norm=1.5,
    guard=GuardState((3.0, 2.5), 18, strikes=1, bar=0.5, good=PrecisionMap({}, objective=0.5)),
    alarm=Alarm(7, "a spike", 6.0, 5.0),
    in_flight=StepFigures(6, 3.0, 0.5, broken=True, answered=True),
    spent=BudgetSpent(0, 7, 3.5, 6.0, 20),
)


def test_every_part_is_the_same_afterwards() -> None:
    assert ControllerState.from_bytes(FULL.to_bytes()) == FULL


def test_a_goal_that_an_earlier_commit_stored_is_left_out() -> None:
    body = {**json.loads(FULL.to_bytes()), "goal": {"budget": "fp4=0.5", "schedule": "static"}}
    assert ControllerState.from_bytes(json.dumps(body).encode()) == FULL


def test_a_run_without_phases_solves_an_undecided_update_for_one_map() -> None:
    """The checkpoint lies between the second update's probe before step 12 and its decision at 14."""
    answer = planned(1, 40, at_4=Format.FP4, at_20=Format.FP8)
    before = Run(Script({1: [answer]}), timeline=Timeline(40, AUTO), schedule="auto", update_interval=10)
    before.steps(0, 13)
    state = ControllerState.from_bytes(before.controller.state_to_save())
    assert state.pending is not None
    assert state.pending.phases is not None
    after = Run(Script(), state, timeline=Timeline(40), update_interval=10)
    after.steps(13, 14)
    assert after.script.phases == [None]
