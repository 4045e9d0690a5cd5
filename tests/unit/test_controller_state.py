"""The checkpoint's state: what was measured of options survives it; anything else there is a SnipError."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from snip_megatron.controller_state import ControllerState
from snip_megatron.errors import SnipError
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
