"""The checkpoint's state: it survives a round trip; anything else there is a SnipError."""

from __future__ import annotations

import json

import pytest

from snip_megatron.config import GuardSettings
from snip_megatron.errors import SnipError
from snip_megatron.runtime.guard import Guard
from snip_megatron.runtime.state import ControllerState
from snip_megatron.runtime.step_report import StepFigures


def test_figures_on_their_way_are_the_same_afterwards() -> None:
    figures = StepFigures(6, 3.0, 0.5, broken=True, gradients=(1.0, 2.0), answered=True)
    assert ControllerState.from_bytes(ControllerState(in_flight=figures).to_bytes()).in_flight == figures


def test_figures_of_an_older_release_do_not_say_that_an_update_was_answered() -> None:
    body = json.loads(ControllerState(in_flight=StepFigures(6, 3.0, 0.5, answered=True)).to_bytes())
    del body["in_flight"]["answered"]
    assert ControllerState.from_bytes(json.dumps(body).encode()).in_flight == StepFigures(6, 3.0, 0.5)


@pytest.mark.parametrize("place", [("guard", "bar"), ("in_flight", "loss"), ("in_flight", "grad_norm"), ("grad_norm",)])
def test_an_integer_beyond_float64_is_refused(place: tuple[str, ...]) -> None:
    state = ControllerState(guard=Guard(GuardSettings()).as_dict(), in_flight=StepFigures(6, 3.0, 0.5))
    body = json.loads(state.to_bytes())
    owner = body
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = 10**400
    with pytest.raises(SnipError, match=rf"{'.'.join(place)}: must be a .*number"):
        ControllerState.from_bytes(json.dumps(body).encode())
