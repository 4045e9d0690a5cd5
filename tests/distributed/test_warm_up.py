"""What is compiled before the first step is all that updates, adoptions, steps and validation launch later."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.records.readers import read_events

SNIP = "--snip --snip-gemm hopper --snip-first-update 1 --snip-update-interval 4 --snip-lag 2 --snip-wait 120"

FUSED = "--hidden-size 128 --ffn-hidden-size 256"  # widths that SwiGLU's kernels take


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, "--snip-budget fp4=0.5 --use-distributed-optimizer --eval-iters 1 --eval-interval 4"),
        (1, f"--snip-budget fp4=0.4 --snip-formats fp8_tensor,fp4,fp8 --snip-pin *linear_proj=bf16 {FUSED}"),
        (2, "--snip-budget fp4=0.5 --tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_nothing_is_launched_that_was_not_warmed_up(
    warm: WarmRanks, tmp_path: Path, ranks: int, arguments: str
) -> None:
    run = tmp_path / "run"
    given = tiny_llama_args(*shlex.split(f"{SNIP} {arguments}"), "--bf16", "--snip-dir", str(run), iters=9)
    environment = {"LISTED": str(tmp_path / "listed")}
    done = warm.run(ranks, given, module="listed_pretrain", env=environment, tmp=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    adopted = [event for event in read_events(run) if event["event"] == "adopt"]
    assert [event["step"] for event in adopted] == [3, 7]
    assert all(event["changed"] for event in adopted[:1])
    for rank in range(ranks):
        seen = json.loads((tmp_path / f"listed.{rank}").read_text())
        assert set(seen["launched"]) <= set(seen["warmed up"])
        names = {text.partition("name='")[2].partition("'")[0] for text in seen["launched"]}
        assert {"tile_kernel", "block_kernel", "update_error_kernel", "output_kernel", "squares_kernel"} <= names
        assert any(name.startswith("swiglu") for name in names) or FUSED not in arguments


def test_the_formats_of_a_replayed_run_are_warmed_up(warm: WarmRanks, tmp_path: Path) -> None:
    """They need not be named for the replay, which takes them from the maps."""
    recorded, listed = tmp_path / "recorded", tmp_path / "listed"
    arguments = shlex.split(f"{SNIP} --snip-budget fp4=0.4 --snip-formats fp8_tensor,fp4 --snip-pin *linear_proj=bf16")
    environment = {"LISTED": str(listed)}
    given = tiny_llama_args(*arguments, "--bf16", "--snip-dir", str(recorded), iters=9)
    done = warm.run(1, given, module="listed_pretrain", env=environment, tmp=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    given = tiny_llama_args("--snip", "--snip-gemm", "hopper", "--snip-replay", str(recorded), "--bf16", iters=9)
    done = warm.run(1, given, module="listed_pretrain", env=environment, tmp=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads((tmp_path / "listed.0").read_text())
    assert seen["launched"]
    assert set(seen["launched"]) <= set(seen["warmed up"])
