"""How error lines quote what a user wrote, and which numbers of a JSON file are numbers."""

import math

import pytest
from refusal import refusal

from snip_megatron.precision.errors import QUOTED, SnipError, cut, python_arguments, quoted
from snip_megatron.precision.strict_json import is_finite
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.tools import cli

LONG = "a" * 5000


def test_short_texts_are_quoted_whole() -> None:
    assert quoted("fp5") == "'fp5'"
    assert quoted("x" * (QUOTED - 2)) == repr("x" * (QUOTED - 2))
    assert cut("x" * QUOTED) == "x" * QUOTED


@pytest.mark.parametrize("value", [LONG, [LONG], {LONG: 1}, 10**4000, b"a" * 5000])
def test_long_ones_are_cut(value: object) -> None:
    assert len(quoted(value)) == QUOTED
    assert quoted(value).endswith("...")


def test_what_is_a_finite_number() -> None:
    assert not any(map(is_finite, (10**400, -(10**400), math.inf, math.nan, True, "1", None)))
    assert all(map(is_finite, (0, -1, 1e308, 10**308)))


@pytest.mark.parametrize(
    "field",
    [
        {"policy": LONG},
        {"budget": LONG},
        {"budget": f"fp4={LONG}"},
        {"stage_tolerance": LONG},
        {"pin": (LONG,)},
        {"formats": (LONG,)},
        {"q": LONG},
        {"estimator": LONG},
    ],
)
def test_arguments_are_cut(field: dict[str, object]) -> None:
    assert "a" * (QUOTED + 1) not in refusal(SnipConfig, enabled=True, **field)


def test_the_parser_of_the_command_line_cuts_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["solve", "problem.json", "--time-limit", LONG])
    line = capsys.readouterr().err
    assert "a" * 40 in line
    assert "a" * (QUOTED + 1) not in line


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
