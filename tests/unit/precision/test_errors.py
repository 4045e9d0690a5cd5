"""How error lines quote what a user wrote, and which numbers of a JSON file are numbers."""

import math

import pytest

from snip_megatron.precision.errors import QUOTED, SnipError, python_arguments, quoted
from snip_megatron.precision.strict_json import is_finite

LONG = "a" * 5000


@pytest.mark.parametrize("value", [LONG, [LONG], {LONG: 1}, 10**4000, b"a" * 5000])
def test_long_values_are_cut(value: object) -> None:
    assert len(quoted(value)) == QUOTED
    assert quoted(value).endswith("...")


def test_what_is_a_finite_number() -> None:
    assert not any(map(is_finite, (10**400, -(10**400), math.inf, math.nan, True, "1", None)))
    assert all(map(is_finite, (0, -1, 1e308, 10**308)))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("--snip-first-update -1: must be at least 0", "first_update=-1: must be at least 0"),
        ("--snip-budget fp4=0.5 is out of reach", "budget='fp4=0.5' is out of reach"),
        ("--snip-map and --snip-replay cannot be combined", "map= and replay= cannot be combined"),
        ("--snip-settings probe_tokens=0: must be 1", "probe_tokens=0: must be 1"),
        ("use --snip-policy snip, or fisher", "use policy='snip', or fisher"),
    ],
)
def test_a_script_reads_its_own_names_of_arguments(message: str, shown: str) -> None:
    with pytest.raises(SnipError) as caught, python_arguments():
        raise SnipError(message, exit_code=7)
    assert (str(caught.value), caught.value.exit_code) == (shown, 7)
