"""The checkpoint's state: what was measured of options survives it; anything else there is a SnipError."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from snip_megatron.config import GuardSettings
from snip_megatron.errors import SnipError
from snip_megatron.runtime.guard import Guard
from snip_megatron.runtime.state import ControllerState
from snip_megatron.runtime.step_report import StepFigures
from snip_megatron.statistics.measured import MEASURED_COLUMNS, Measured


def measured() -> Measured:
    found = Measured.nothing(4, ("fp8", "fp4"))
    rng = np.random.default_rng(0)
    for name in MEASURED_COLUMNS:
        found[name][1:3] = rng.normal(size=(2, 3, 2))
    return found


def test_what_was_measured_is_bitwise_the_same_afterwards() -> None:
    state = ControllerState.from_bytes(ControllerState(measured=measured()).to_bytes())
    assert state.measured is not None
    assert state.measured.formats == ("fp8", "fp4")
    for name in MEASURED_COLUMNS:
        np.testing.assert_array_equal(state.measured[name], measured()[name])
    assert ControllerState.from_bytes(ControllerState().to_bytes()).measured is None


def test_a_checkpoint_of_an_older_release_has_none() -> None:
    body = json.loads(ControllerState().to_bytes())
    del body["measured"]
    assert ControllerState.from_bytes(json.dumps(body).encode()).measured is None


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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (3, "measured: must be a text"),
        ("!", "measured: "),
        (base64.b64encode(b"nothing").decode(), "measured: not measured columns"),
        (base64.b64encode(measured().to_bytes()[:-40]).decode(), "measured: not measured columns"),
    ],
)
def test_damage_is_one_line(content: object, words: str) -> None:
    body = json.loads(ControllerState().to_bytes()) | {"measured": content}
    with pytest.raises(SnipError, match=words) as caught:
        ControllerState.from_bytes(json.dumps(body).encode())
    assert "\n" not in str(caught.value)
