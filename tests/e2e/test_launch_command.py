"""``snip launch`` as a user runs it: the exact command, the hardware, one line for every mistake."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from snip_megatron.cli import main
from snip_megatron.launch.job import make_job
from snip_megatron.planner.plan import make_plan
from snip_megatron.planner.render import render
from snip_megatron.planner.request import parse_request
from snip_megatron.planner.step_time import StepModel
from snip_megatron.timing.loading import load_cost_model

ROOT = Path(__file__).resolve().parents[2]
SNIP = f"{sys.executable} -m snip_megatron.cli"


def exit_code(*arguments: object) -> object:
    try:
        return main(["launch", *map(str, arguments)])
    except SystemExit as end:  # argparse
        return end.code


def test_a_dry_run_prints_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("70b", "--data", "mock", "--save", tmp_path / "a folder", "--dry-run", "--megatron", "--train-iters", "5")
    assert exit_code(*asked) == 0
    out = capsys.readouterr().out
    assert out.startswith("# Llama 3 70B: llama-70b\n")
    # The shell reads what would be run.
    words = shlex.split(out, comments=True)
    words = [word for word in words if word.strip()]
    assert words[-4:] == ["--train-iters", "5", "--load", str(tmp_path / "a folder")]
    assert words[words.index("--save") + 1] == str(tmp_path / "a folder")
    assert words[words.index("--rdzv-endpoint") + 1] == "HEAD_NODE:29500"
    assert (
        words.index("torch.distributed.run") < words.index("snip_megatron.pretrain_gpt") < words.index("--num-layers")
    )


def test_what_is_printed_runs(tmp_path: Path) -> None:
    """The command of a dry run, with Megatron's help in place of training."""
    wishes = ["1b", "--smoke", "--cpu", "--nodes", "1", "--gpus-per-node", "1", "--dry-run", "--save"]
    printed = subprocess.run(
        [*shlex.split(SNIP), "launch", *wishes, str(tmp_path)],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    script = printed.replace("-m torch.distributed.run", "-c 'import sys; print(sys.argv[1:])'")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert "'--standalone', '-m', 'snip_megatron.pretrain_gpt', '--num-layers', '2'" in done.stdout


def without_clock(plan: str) -> list[str]:
    return [line.partition(": optimal in")[0] for line in plan.splitlines()]


def test_a_check_says_what_to_expect_of_the_model_that_megatron_builds(capfd: pytest.CaptureFixture[str]) -> None:
    """Its linears are those of the table of known models."""
    wanted = ("70b", "--cpu", "--data", "mock", "--save", "/nowhere/c", "--check")
    assert exit_code(*wanted) == 0
    expected = capfd.readouterr().out
    assert expected.startswith(
        "Llama 3 70B: llama-70b\nllama-70b: 70.57 B parameters, 80 blocks\nTP 8 × PP 4 × DP 2 = 64"
    )
    layout = replace(make_job("70b", data="mock", save=Path("/nowhere/c")).layout, gradient_accumulation_fusion=False)
    layout = replace(layout, model=replace(layout.model, vocabulary=129_024))  # as Megatron pads it
    table = load_cost_model("h200")
    known = render(make_plan(StepModel(layout, table), parse_request({}, table)))
    assert without_clock(expected.partition("\n")[2]) == without_clock(known)
    assert exit_code(*wanted, "--megatron", "--nonsense") == 2
    assert capfd.readouterr().err == "snip launch: unrecognized arguments: --nonsense\n"


@pytest.mark.parametrize(
    ("arguments", "line"), [(("1b",), "1 8"), (("70b",), "8 8"), (("70b-pp8", "--gpus-per-node", 4), "16 4")]
)
def test_hardware(arguments: tuple[object, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments, "--data", "mock", "--save", "/nowhere/c", "--hardware") == 0
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("7b --save x", "--data: missing"),
        ("70b --data mock --save x", "--nodes 8: give --rendezvous HOST:PORT, the same on every node"),
        ("7b --data mock --save x --cores 8", "unrecognized arguments: --cores 8 (see snip launch --help)"),
        ("7b --data mock --save x --pp two", "argument --pp: invalid int value: 'two'"),
        ("7b --data mock --save x --recompute most", "argument --recompute: invalid choice: 'most'"),
    ],
)
def test_refusals(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"snip launch: {message}")
    assert err.count("\n") == 1


def test_the_script_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "torchrun.sh"), "3b", "--data", "mock", "--save", str(tmp_path), "--hardware"],
        capture_output=True, text=True, env=os.environ | {"SNIP": SNIP, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1 8\n"), done.stderr
