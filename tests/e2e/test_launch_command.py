"""``snip launch`` as a user runs it: the exact command, the hardware, one line for every mistake."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from snip_command import ROOT, SNIP, refused, snip, snip_alone

from snip_megatron.planner.plan import make_plan, parse_config
from snip_megatron.planner.render import render
from snip_megatron.planner.step_time import StepModel
from snip_megatron.timing.cost_model import load_cost_model
from snip_megatron.tools import torchrun
from snip_megatron.tools.launch import make_job


def test_a_dry_run_prints_a_script(tmp_path: Path) -> None:
    asked = ("70b", "--data", "mock", "--save", tmp_path / "a folder", "--dry-run", "--megatron", "--train-iters", "5")
    out = snip("launch", *asked).stdout
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


def without_clock(plan: str) -> list[str]:
    return [re.sub(r": (optimal|feasible) in .*|solver [\d.]+ s", "", line) for line in plan.splitlines()]


def test_a_check_says_what_to_expect_of_the_model_that_megatron_builds(tmp_path: Path) -> None:
    """Its linears are those of the table of known models. The loggers of the training stay closed."""
    reference = ("70b", "--cpu", "--data", "mock", "--save", "/nowhere/c", "--check")
    logged = ("--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", tmp_path)
    expected = snip("launch", *reference, "--megatron", *logged, "--tensorboard-dir", tmp_path).stdout
    assert list(tmp_path.iterdir()) == []
    head = "Llama 3 70B: llama-70b\nllama-70b: 70.57 B parameters, 80 blocks\nTP 8 × PP 4 × DP 2 = 64"
    assert expected.startswith(head)
    job = make_job("70b", data="mock", save=Path("/nowhere/c"))
    layout = replace(job.layout, gradient_accumulation_fusion=False)
    layout = replace(layout, model=replace(layout.model, vocabulary=129_024))  # as Megatron pads it
    table = load_cost_model("h200")
    plan = render(make_plan(StepModel(layout, table), parse_config({}, table, has_end=True)))
    assert "by gemm: the fastest uniform map, because" in plan
    assert without_clock(expected.partition("\n")[2]) == without_clock(plan)
    assert refused("launch", *reference, "--megatron", "--nonsense") == "unrecognized arguments: --nonsense"


@pytest.mark.parametrize(
    ("arguments", "line"), [(("1b",), "1 8"), (("70b",), "8 8"), (("70b-pp8", "--gpus-per-node", 4), "16 4")]
)
def test_hardware(arguments: tuple[object, ...], line: str) -> None:
    process = snip("launch", *arguments, "--data", "mock", "--save", "/nowhere/c", "--hardware")
    assert (process.returncode, process.stdout) == (0, f"{line}\n")


def test_a_whole_model_is_not_trained_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "supervise", lambda *arguments: (0, None))
    expected = ("1b", "--cpu", "--data", "mock", "--save", tmp_path)
    assert refused("launch", *expected) == (
        "--cpu trains only a tiny model: add --smoke, or leave out --cpu to train llama-1b on GPUs"
    )
    assert snip("launch", *expected, "--smoke").returncode == 0


def test_the_script_is_the_command(tmp_path: Path) -> None:
    script = ("bash", str(ROOT / "launch" / "torchrun.sh"))
    wishes = ("3b", "--data", "mock", "--save", tmp_path, "--hardware")
    process = snip_alone(*wishes, command=script, SNIP=shlex.join(SNIP))
    assert (process.returncode, process.stdout) == (0, "1 8\n"), process.stderr
