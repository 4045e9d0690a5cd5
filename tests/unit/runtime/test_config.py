"""SnipConfig: its arguments come from the dataclass, and every value that cannot work gives one clear line."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusal import refusal

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import AUTO
from snip_megatron.runtime.config import (
    FASTEST,
    SnipConfig,
    add_arguments,
    dominated,
    parse_snip_arguments,
    resolve_arguments,
)
from snip_megatron.runtime.options import is_option

FIELDS = {f.name: f for f in dataclasses.fields(SnipConfig) if f.name != "enabled"}
OPTIONS = {name: f for name, f in FIELDS.items() if is_option(f)}


def parse(*argv: str) -> SnipConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return resolve_arguments(add_arguments(parser).parse_args(argv))


def flag(name: str) -> str:
    return f"--snip-{name.replace('_', '-')}"


# -- arguments -------------------------------------------------------------------------------------------------
def test_every_option_is_an_argument_with_help_and_default() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    actions = {action.dest: action for action in parser._actions}
    assert set(actions) - {"help", "snip", "snip_settings", "snip_config", argparse.SUPPRESS} == {
        f"snip_{name}" for name in OPTIONS
    }
    assert len(set(actions) - {"help", "snip"}) <= 34  # a user of a job can read them all
    assert all(actions[f"snip_{name}"].help for name in OPTIONS)
    assert f"; default: {SnipConfig.lag}" in actions["snip_lag"].help


def test_snips_arguments_are_parsed_among_megatrons() -> None:
    args = parse_snip_arguments(["--snip", "--num-layers", "2", "--snipped", "--snip-no-compat", "cpu"])
    assert (args.snip, args.snip_no_compat) == (True, ("cpu",))
    assert parse_snip_arguments(["--num-layers", "2"]).snip_no_compat == ()
    with pytest.raises(SnipError, match="argument --snip-lag: invalid int value: 'soon'"):
        parse_snip_arguments(["--snip", "--snip-lag", "soon"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--snip-buget", "fp4=0.5"], "unrecognized arguments: --snip-buget; did you mean --snip-budget?"),
        (["--snip-first_update=3"], "unrecognized arguments: --snip-first_update; did you mean --snip-first-update?"),
        (["--snip-xyz"], "unrecognized arguments: --snip-xyz"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_closest_one(argv: list[str], message: str) -> None:
    assert refusal(parse_snip_arguments, ["--snip", *argv]) == message


def test_settings() -> None:
    config = parse("--snip", "--snip-settings", "probe_tokens=64", "--snip-settings", '{"deadline": 7.0, "lag": 3}')
    assert config == SnipConfig(enabled=True, probe_tokens=64, deadline=7.0, lag=3)
    assert parse("--snip", "--snip-settings", "lag=5", "--snip-lag", "4").lag == 4  # an argument wins
    assert refusal(parse, "--snip", "--snip-settings", "probe_token=5")
    wrong = refusal(parse, "--snip", "--snip-settings", '{"map": 5}')
    assert wrong == "--snip-settings map: expected str, not 5"


def test_a_file_of_options(tmp_path: Path) -> None:
    """The command line wins over it, and the configuration that a run stores is accepted back."""
    file = tmp_path / "snip.yaml"
    file.write_text("budget: fp4=0.5\nformats: fp8,fp4\npin: ['*.linear_qkv=fp8']\nlag: 3\nno_compat: [cpu]\n")
    expected = SnipConfig(enabled=True, budget=Budget("fp4", 0.5), pin=("*.linear_qkv=fp8",), lag=3, no_compat=("cpu",))
    assert parse("--snip", "--snip-config", str(file)) == expected
    assert parse_snip_arguments(["--snip-config", str(file)]).snip_no_compat == ("cpu",)
    other = parse("--snip", "--snip-config", str(file), "--snip-lag", "5", "--snip-settings", "probe_tokens=64")
    assert other == dataclasses.replace(expected, lag=5, probe_tokens=64)

    stored = json.dumps(
        {"schema": "snip.run/1", "config": {**other.as_dict(), "num_layers": 2}, "facts": {"first_update": 7}}
    )
    (tmp_path / "config.json").write_text(stored)
    for path in (tmp_path, tmp_path / "config.json"):
        assert parse("--snip", "--snip-config", str(path)) == other  # 7 followed from the length of that run
    assert "without --snip" in refusal(parse, "--snip-config", str(file))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "buget: fp4=0.5", "buget: unknown; did you mean budget?"),
        ("a.json", '{"lag": "soon"}', "lag: expected int, not soon"),
        ("a.yaml", "pin: [1]", "pin: expected texts, not (1,)"),
        ("a.yaml", "- lag", "not an object of options by name"),
        ("a.yaml", "{", "not YAML: "),
        ("a.json", "lag: 3", "not a JSON object (it must start with '{')"),
        ("a.json", '{"schema": "snip.map/1"}', 'schema: must be "snip.run/1"'),
    ],
)
def test_a_wrong_file_of_options_is_one_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    where = f"--snip-config {tmp_path / name}"
    assert refusal(parse, "--snip", "--snip-config", str(tmp_path / name)).startswith(f"{where}: {message}")


@pytest.mark.parametrize(
    ("argv", "backend", "expected"),
    [
        ("", "hopper", ("loss=0.002", "bf16,fp8,fp8_tensor", "auto")),
        ("", "blackwell", ("loss=0.002", "bf16,mxfp8,nvfp4", "auto")),
        ("", None, ("fp4=0.75", "fp8,fp4", "static")),
        ("--snip-formats fp8,fp4", "hopper", ("fp4=0.75", "fp8,fp4", "static")),  # to study FP4
        ("--snip-policy random", "hopper", ("fp4=0.75", "fp8,fp4", "static")),  # no scores in nats
        ("--snip-budget speedup=1.2", "hopper", ("speedup=1.2", "bf16,fp8,fp8_tensor", "static")),
        ("--snip-budget fp4=0.5", "blackwell", ("fp4=0.5", "mxfp8,nvfp4", "static")),
        ("--snip-budget loss=0.01 --snip-timings flops", "hopper", ("loss=0.01", "bf16,fp8,fp4", "static")),
        ("--snip-granularity layer", "hopper", ("loss=0.002", "bf16,fp8,fp8_tensor", "static")),  # has no phases
        ("--snip-schedule static", "hopper", ("loss=0.002", "bf16,fp8,fp8_tensor", "static")),
    ],
)
def test_what_is_left_open_follows_from_the_card(argv: str, backend: str | None, expected: tuple[str, ...]) -> None:
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--train-iters", type=int)
    config = resolve_arguments(parser.parse_args(["--snip", "--train-iters", "1000", *argv.split()]), backend)
    assert (str(config.budget), ",".join(config.formats), config.schedule) == expected


@pytest.mark.parametrize(
    ("argv", "backend", "expected"),
    [
        ("", "hopper", (str(FASTEST), "static")),
        ("", "blackwell", (str(FASTEST), "static")),
        ("", None, ("fp4=0.75", "static")),  # emulated: no map is faster
        ("--snip-budget loss=0.01", "hopper", ("loss=0.01", "static")),
    ],
)
def test_mock_data_has_no_loss_to_protect(argv: str, backend: str | None, expected: tuple[str, str]) -> None:
    args = add_arguments(argparse.ArgumentParser()).parse_args(["--snip", *argv.split()])
    config = resolve_arguments(argparse.Namespace(**vars(args), mock_data=True, train_iters=50), backend)
    assert (str(config.budget), config.schedule) == expected


@pytest.mark.parametrize(
    ("argv", "length", "expected"),
    [
        ("", {}, 100),
        ("", {"train_iters": 100_000}, 100),
        ("", {"train_iters": 600}, 60),
        ("", {"train_samples": 6400, "global_batch_size": 64}, 10),
        ("", {"train_iters": 20}, 5),
        ("--snip-first-update 30", {"train_iters": 50}, 30),
    ],
)
def test_a_short_run_updates_early(argv: str, length: dict[str, int], expected: int) -> None:
    args = add_arguments(argparse.ArgumentParser()).parse_args(["--snip", *argv.split()])
    assert resolve_arguments(argparse.Namespace(**vars(args), **length)).first_update == expected


def test_a_share_of_fp4_where_four_bits_are_no_faster_is_said() -> None:
    line = dominated(Budget("fp4", 0.75), ("fp8", "fp4"), "hopper")
    assert "fp8 everywhere" in line
    assert "--snip-budget loss=0.002 --snip-formats bf16,fp8,fp8_tensor" in line
    assert "for speed" not in (dominated(Budget("fp4", 0.75), ("fp8", "fp4"), "hopper", times=False) or "")
    assert dominated(Budget("fp4", 0.75), ("mxfp8", "nvfp4"), "blackwell") is None
    assert dominated(Budget("loss", 0.01), ("bf16", "fp8"), "hopper") is None


# One of each type: arguments are generated from the fields.
SAMPLES: dict[str, tuple[list[str], Any]] = {
    "formats": (["nvfp4,mxfp8"], ("nvfp4", "mxfp8")),
    "timings": (["t.json"], "t.json"),
    "lag": (["3"], 3),
    "deploy": (["bf16"], "bf16"),
    "wait": (["30"], 30.0),
    "pin": (["*=fp4", "--snip-pin", "*.layers.0.*:fprop=bf16"], ("*=fp4", "*.layers.0.*:fprop=bf16")),
    "overwrite": ([], True),
    "no_compat": (["cpu"], ("cpu",)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_each_argument_reaches_its_field_and_no_other(name: str) -> None:
    values, expected = SAMPLES[name]
    # No timings beside a share of FLOPs, and nothing to deploy without phases.
    context = {"timings": ("--snip-budget", "speedup=1.2"), "deploy": ("--snip-schedule", "auto")}.get(name, ())
    config = parse("--snip", flag(name), *values, *context)
    assert getattr(config, name) == expected != FIELDS[name].default
    assert config == dataclasses.replace(parse("--snip", *context), **{name: expected})


# -- values that cannot work -----------------------------------------------------------------------------------
BAD = [
    ("--snip-budget 0.75", "--snip-budget", "fp4=SHARE"),
    ("--snip-budget speedup=0.9", "--snip-budget speedup=0.9", "must be a factor from 1 to 1e+06"),
    ("--snip-budget loss=-1", "--snip-budget loss=-1", "0 or more nats"),
    ("--snip-formats bf16,fp4", "--snip-formats bf16,fp4", "under fp4=", "pin GEMMs"),
    ("--snip-timings t.json", "--snip-timings t.json", "--snip-budget fp4=0.75"),
    ("--snip-budget loss=0.1 --snip-policy random", "--snip-budget loss=0.1", "--snip-policy random"),
    ("--snip-budget loss=0.1 --snip-q paper --snip-estimator noise", "--snip-budget loss=0.1", "--snip-q paper"),
    ("--snip-policy best", "--snip-policy best", "backward-first"),
    ("--snip-q paper", "--snip-q paper", "--snip-estimator noise"),
    ("--snip-formats fp8,fp8,fp4", "--snip-formats fp8,fp8,fp4", "distinct"),
    ("--snip-formats fp8", "--snip-formats fp8", "--snip-budget fp4=0.75", "fp4"),
    ("--snip-stage-tolerance 2", "--snip-stage-tolerance 2", "between 0 and 1"),
    ("--snip-pin fc2", "--snip-pin fc2", "GLOB=FORMAT"),
    ("--snip-pin *=fp5", "--snip-pin *=fp5", "bf16"),
    ("--snip-lag 0", "--snip-lag 0", "at least 1"),
    ("--snip-lag 50 --snip-update-interval 50", "--snip-lag 50", "--snip-update-interval 50"),
    ("--snip-settings probe_tokens=0", "--snip-settings probe_tokens=0", "at least 1"),
    ("--snip-settings deadline=NaN", "--snip-settings deadline=nan", "positive"),
    ("--snip-settings lag=fast", "--snip-settings lag", "expected int"),
    ("--snip-settings speed=1", "--snip-settings speed: unknown", ""),
    ("--snip-settings probe_tokens", "--snip-settings probe_tokens", "NAME=VALUE"),
    ("--snip-map a.json --snip-replay b", "--snip-map", "--snip-replay"),
    ("--snip-map a.json --snip-pin *=fp8", "--snip-map", "--snip-pin"),
    ("--snip-schedule sometimes", "--snip-schedule sometimes: cannot be read (No such file or directory)"),
    ("--snip-deploy bf16", "--snip-deploy bf16 has no effect with --snip-schedule static"),
    ("--snip-schedule auto --snip-map m.json", "--snip-map m.json cannot be combined with --snip-schedule auto"),
    ("--snip-schedule auto --snip-update-interval 0", "--snip-update-interval 0 cannot be combined with --snip-s"),
    ("--snip-schedule auto --snip-granularity layer", "--snip-granularity layer cannot be combined with --snip-s"),
    ("--snip-policy late-all --snip-budget loss=1", "--snip-policy late-all cannot be combined with --snip-budget"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[0])
def test_one_clear_line_for_each_bad_value(case: tuple[str, ...]) -> None:
    argv, *words = case
    message = refusal(parse, "--snip", *argv.split())
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "no_compat"])
def test_arguments_without_the_switch_are_refused(name: str) -> None:
    """They would be ignored in silence, and the run would train without SNIP."""
    with pytest.raises(SnipError, match=f"{flag(name)} has no effect without --snip"):
        parse(flag(name), *SAMPLES[name][0])


# -- derived values --------------------------------------------------------------------------------------------
POLICIES = ("bf16", "uniform-fp8", "uniform-fp4", "late-forward", "late-all")


@pytest.mark.parametrize(
    "argv", ["update-interval 0", "map m.json", "replay run", *(f"policy {policy}" for policy in POLICIES)]
)
def test_runs_without_updates(argv: str) -> None:
    config = parse("--snip", *f"--snip-{argv}".split())
    assert not config.updates
    assert not any(config.is_update_step(step) for step in range(0, 5000, 50))


def test_update_steps() -> None:
    config = parse("--snip", "--snip-first-update", "7", "--snip-update-interval", "20", "--snip-lag", "5")
    assert [step for step in range(60) if config.is_update_step(step)] == [7, 27, 47]


KINDS = st.sampled_from(["fp4=", "speedup=", "loss="])


@given(st.text(max_size=20) | st.builds(str.__add__, KINDS, st.text(max_size=8) | st.floats().map(str)))
def test_any_budget_is_in_range_or_a_snip_error(text: str) -> None:
    fault, budget = "--snip-budget", Budget("fp4", 0.0)
    try:
        budget = SnipConfig(enabled=True, budget=text).budget
    except SnipError as error:
        fault = str(error)
    assert fault.startswith("--snip-budget")
    figure = budget.value
    assert {"fp4": 0.0 <= figure <= 1.0, "speedup": figure >= 1.0, "loss": 0.0 <= figure < math.inf}[budget.kind]


# -- schedules -------------------------------------------------------------------------------------------------
def test_a_schedule_is_static_auto_or_a_file(tmp_path: Path) -> None:
    assert SnipConfig().phases is None
    assert parse("--snip", "--snip-schedule", "auto").phases == AUTO
    path = tmp_path / "late.json"
    path.write_text('{"schema": "snip.schedule/1", "phases": [{"from": 0}, {"from": 0.9, "budget": "fp4=0.5"}]}')
    read = parse("--snip", "--snip-schedule", str(path)).phases
    assert [phase.begin for phase in read.phases] == [0.0, 0.9]
    with pytest.raises(SnipError, match=r"phases\[1\].budget: fp4=0.5 cannot be combined with --snip-budget speedup="):
        parse("--snip", "--snip-schedule", str(path), "--snip-budget", "speedup=1.2")
    inline = parse("--snip", "--snip-schedule", path.read_text())
    assert inline.phases == read
    path.write_text("{}")
    assert inline.phases == read  # a file is read once
    with pytest.raises(SnipError, match=r"^--snip-schedule .*late.json: schema: must be"):
        parse("--snip", "--snip-schedule", str(path))
