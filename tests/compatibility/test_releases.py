"""``python -m pytest -m compatibility``: the supported releases that are not installed train 20 steps under SNIP.

Each from its wheel, before the installed one in the path; everything else is this environment's.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from wheels import RELEASES, extract

from snip_megatron.precision import Format, Gemm
from snip_megatron.runtime.run_data import read_events, read_maps, read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "distributed"))
from launch import cpu_environment, run_ranks, tiny_llama_args  # noqa: E402

STEPS = 20
SNIP = ["--snip", "--snip-first-update", "2", "--snip-update-interval", "10", "--snip-lag", "8", "--snip-wait", "120"]
LAYOUTS = {
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel --bf16",
    "pp2": "--pipeline-model-parallel-size 2",
    "dp2-distributed-optimizer": "--use-distributed-optimizer --bf16",
}


@pytest.fixture(scope="module", params=[each for each in RELEASES if each != version("megatron-core")])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    return name, extract(name, tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp(name))


def train(megatron: Path, tmp: Path, *extra: str, name: str = "run") -> tuple[Path, str]:
    """The run directory of 2 ranks, and what was printed."""
    run = tmp / name
    args = tiny_llama_args(*SNIP, "--snip-dir", str(run), "--eval-iters", "1", *extra, iters=STEPS)
    path = os.pathsep.join((str(megatron), cpu_environment()["PYTHONPATH"]))
    process = run_ranks(2, args, tmp=tmp, timeout=300, env={"PYTHONPATH": path})
    assert process.returncode == 0, process.stderr[-4000:]
    return run, process.stdout


def check(run: Path) -> None:
    """It learned, adopted two maps within the budget, and validated."""
    losses = [figure["loss"] for figure in read_metrics(run)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1.0
    events = read_events(run)
    assert [event["step"] for event in events if event["event"] == "adopt"] == [10]
    assert any(event["event"] == "validation" for event in events)
    (adopted,) = read_maps(run).values()
    assert adopted.status == "optimal"
    assert adopted.achieved is not None
    assert adopted.achieved >= 0.75
    assert {adopted.format_of(name, gemm) for name in adopted.choices for gemm in Gemm} == {Format.FP4, Format.FP8}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_twenty_steps(release: tuple[str, Path], layout: str, tmp_path: Path) -> None:
    name, megatron = release
    assert installed(megatron) == name
    run, shown = train(megatron, tmp_path, *layout.split())
    assert "compat: step-hook: Megatron's train_step and evaluate wrapped at run time" in shown
    check(run)


def test_a_resumed_run_continues_bitwise(release: tuple[str, Path], tmp_path: Path) -> None:
    """The checkpoint lies between submitting an update and adopting it."""
    _, megatron = release
    extra = ("--use-distributed-optimizer", "--hidden-dropout", "0.1", "--save-interval", "5")
    whole, _ = train(megatron, tmp_path, *extra, "--save", str(tmp_path / "ckpt"))
    resumed, _ = train(megatron, tmp_path, *extra, "--load", str(tmp_path / "ckpt"), "--ckpt-step", "5", name="resumed")
    expected = {figure["step"]: figure["loss"] for figure in read_metrics(whole)}
    found = {figure["step"]: figure["loss"] for figure in read_metrics(resumed)}
    assert found == {step: loss for step, loss in expected.items() if step >= 5}


def installed(megatron: Path) -> str:
    code = "from megatron.core import __version__; print(__version__)"
    environment = os.environ | cpu_environment() | {"PYTHONPATH": str(megatron)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip().splitlines()[-1]
