"""What ``snip plan`` says an update exchanges and opens is what real ranks exchange and open."""

import json
from pathlib import Path
from typing import Any

import pytest
from launch import tiny_llama_args
from warm_ranks import WarmRanks

SNIP = "--snip --snip-budget fp4=0.5 --snip-first-update 2 --snip-update-interval 100 --snip-lag 2 --snip-wait 240"
LAYOUTS = {
    # More tokens than those whose outputs are recorded, and a word embedding that two stages share.
    "pipeline and data, tied": (
        4,
        "--pipeline-model-parallel-size 2 --seq-length 640 --max-position-embeddings 640 --micro-batch-size 1"
        " --snip-estimator noise",
    ),
    # Capacity gives each expert as many tokens.
    "tensor and data, experts": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 --moe-router-topk 2 --moe-layer-freq"
        " [0,1,1,0] --moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.0"
        " --moe-pad-expert-input-to-capacity --snip-estimator noise",
    ),
    "tensor, one pass": (2, "--tensor-model-parallel-size 2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_counts_what_ranks_do(layout: str, warm: WarmRanks, tmp_path: Path) -> None:
    ranks, arguments = LAYOUTS[layout]
    args = tiny_llama_args(*SNIP.split(), *arguments.split(), "--snip-dir", str(tmp_path / "run"), iters=6)
    if "tied" in layout:
        args.remove("--untie-embeddings-and-output-weights")
    warm.succeed(ranks, args, module="counted_pretrain", tmp=tmp_path / "ranks", env={"COUNTED": str(tmp_path)})
    measured = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    planned = measured[0]["planned"]
    assert planned["ranks"][0]["ranks"] == ranks
    expected: dict[str, Any] = planned["ranks"][0]["groups"]
    # Maps with the same fprops share a forward.
    shared = planned["forwards"] - measured[0]["forwards"]
    expected["world"][0] -= shared
    expected["world"][1] += measured[0]["decision"] - planned["decision_bytes"] - 16 * shared
    fullest = max(measured, key=lambda rank: sum(size for _, size in rank["calls"].values()))
    assert fullest["calls"] == expected
    for rank in measured:
        assert rank["calls"]["world"] == expected["world"]  # of which all must be a part
    assert planned["ranks"][-1]["ranks"] == 16_384
    # Rank 0 alone touches files, and only those of the run.
    run = str(tmp_path / "run")
    assert all(path.startswith(run) for path in measured[0]["opened"])
    assert measured[0]["opened"]
    assert [rank["opened"] for rank in measured[1:]] == [[]] * (ranks - 1)
