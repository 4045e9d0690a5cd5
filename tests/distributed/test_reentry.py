"""The end of a run, and training again in the same process.

Process groups are destroyed at the end, except those whose collectives may be in CUDA graphs.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from checkpoints import read_checkpoint
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.runtime.run_data import read_events, read_metrics
from snip_megatron.runtime.state import ControllerState

STEPS = 18
SNIP = shlex.split(
    "--snip --snip-first-update 2 --snip-update-interval 6 --snip-lag 3 --snip-wait 120"
    " --eval-iters 1 --eval-interval 9 --num-layers 2 --save-interval 5"
)


def train(warm: WarmRanks, tmp: Path, name: str, **env: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    run, checkpoints = tmp / name / "run", str(tmp / name / "checkpoints")
    where = ("--snip-dir", str(run), "--save", checkpoints, "--load", checkpoints)
    args = tiny_llama_args(*SNIP, *where, iters=STEPS)
    process = warm.succeed(1, args, module="altered_pretrain", env=env, tmp=tmp / name / "ranks")
    assert re.search(r"process groups left: False\nsolver processes left: \[\] of [1-9]", process.stdout)
    return run, process


@pytest.fixture(scope="module")
def whole(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(warm, tmp_path_factory.mktemp("whole"), "whole")[0]


def test_an_in_process_restart_continues_bitwise(warm: WarmRanks, whole: Path, tmp_path: Path) -> None:
    """The model is built anew in the same process, from the checkpoint of step 5, with a map in force."""
    run, _ = train(warm, tmp_path, "restarted", CRASH="9")  # before a decision
    assert [e["step"] for e in read_events(run) if e["event"] == "resume"][-1] == 5
    figures = [
        [(m["step"], m["loss"], m["grad_norm"], m["fp4_fraction"]) for m in read_metrics(r)] for r in (run, whole)
    ]
    assert figures[0] == figures[1]
    # Once a validation: a wrapper left over from the first start would record each twice.
    for kind, count in (("validation", 2), ("adopt", 3)):
        assert len({e["step"] for e in read_events(whole) if e["event"] == kind}) >= count - 1
        records = [(e["step"], e.get("loss"), e.get("version")) for e in read_events(run) if e["event"] == kind]
        assert len(records) == len(set(records))


def test_a_second_run_in_one_process_resumes_the_first(warm: WarmRanks, tmp_path: Path) -> None:
    """It finds the job done: Megatron's patches are undone and made again, and nothing is left behind.

    Megatron saves the last checkpoint again, after a load and without a step: it holds the state that was loaded.
    """
    run, process = train(warm, tmp_path, "twice", TWICE="1")
    assert process.stdout.count("compat: step-hook:") == 2
    assert [m["step"] for m in read_metrics(run)] == list(range(STEPS))
    assert process.stdout.count(f"successfully saved checkpoint from iteration {STEPS:7d}") == 2
    (content,) = read_checkpoint(tmp_path / "twice" / "checkpoints", STEPS)["snip.state/shard_0_1"]
    assert ControllerState.from_bytes(content.numpy().tobytes()).precision_map is not None


def test_process_groups_of_cuda_graphs_are_left(warm: WarmRanks, tmp_path: Path) -> None:
    """Without its steps, which capture on a GPU alone, a run with graphs is the same on the CPU.

    On a GPU, NCCL would wait for the graphs, which live as long as the process, and the run would not end.
    """
    args = tiny_llama_args("--skip-train", "--cuda-graph-impl", "transformer_engine")
    process = warm.succeed(1, args, module="altered_pretrain", tmp=tmp_path)
    assert "skipping training (--skip-train is on)" in process.stdout
    assert "process groups left: True" in process.stdout
