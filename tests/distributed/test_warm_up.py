"""What is compiled before the first step is all that updates, adoptions, steps and validation launch later."""

import json
import shlex
from pathlib import Path

from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.runtime.run_data import read_events

SNIP = (
    "--snip --snip-estimator noise --snip-gemm hopper --snip-first-update 1 --snip-update-interval 4 --snip-lag 2"
    " --snip-wait 120"
)

# A candidate with one scale a tensor, a validation, shards of gathered tokens, and widths that SwiGLU's kernels take.
ARGUMENTS = (
    "--snip-budget fp4=0.4 --snip-formats fp8_tensor,fp4,fp8 --snip-pin *linear_proj=bf16 --eval-iters 1"
    " --eval-interval 4 --hidden-size 128 --ffn-hidden-size 512"
)


def test_nothing_is_launched_that_was_not_warmed_up(warm: WarmRanks, tmp_path: Path) -> None:
    assert_all_is_warmed_up(warm, tmp_path, "--tensor-model-parallel-size 2 --sequence-parallel")


def assert_all_is_warmed_up(warm: WarmRanks, tmp_path: Path, layout: str, **variables: str) -> None:
    run = tmp_path / "run"
    arguments = tiny_llama_args(*shlex.split(f"{SNIP} {ARGUMENTS} {layout}"), "--bf16", "--snip-dir", str(run), iters=9)
    environment = {"LISTED": str(tmp_path / "listed")}
    warm.succeed(2, arguments, module="listed_pretrain", env=environment | variables, tmp=tmp_path)
    adopted = [event for event in read_events(run) if event["event"] == "adopt"]
    assert [event["step"] for event in adopted] == [3, 7]
    assert all(event["changed"] for event in adopted[:1])
    for rank in range(2):
        kernels = json.loads((tmp_path / f"listed.{rank}").read_text())
        assert set(kernels["launched"]) <= set(kernels["warmed up"])
        names = {json.loads(text)["name"].rpartition(".")[2] for text in kernels["launched"]}
        assert {"tile_kernel", "block_kernel", "weight_kernel"} <= names
        assert any(name.startswith("swiglu") for name in names)
