"""``--snip-blame`` through the real entry: planted faults and healthy steps on gloo ranks."""

import json
import shlex
from pathlib import Path
from typing import Any

from launch import tiny_llama_args
from warm_ranks import WarmRanks

LINEAR = "decoder.layers.1.mlp.linear_fc1"
EXPERTS = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-layer-freq [0,1,1,0]"
    " --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
)


def verdicts(warm: WarmRanks, tmp: Path, ranks: int, cases: str, *layout: str) -> dict[str, dict[str, Any]]:
    """Return the verdict of each case, all in one start."""
    (tmp / "map.yaml").write_text("configs: {}\nmatchers: {}\n")  # every case brings a map
    args = tiny_llama_args("--bf16", "--snip", "--snip-map", "map.yaml", "--snip-blame", "1", *layout, iters=3)
    process = warm.succeed(ranks, args, module="blamed_pretrain", env={"CASES": cases}, tmp=tmp)
    assert "Traceback" not in process.stderr
    return {case: json.loads((tmp / f"{case}.json").read_text()) for case in cases.split(",")}


def test_faults_of_tensor_parallel_ranks(warm: WarmRanks, tmp_path: Path) -> None:
    cases = "hurried,cut,part,healthy,narrow,outlier,rows,stale,lost,lost_gradient,raced,late,unequal,again"
    cases += ",stock_healthy,stock_rows,stock_lost,stock_lost_gradient"
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer"]
    result = verdicts(warm, tmp_path, 2, cases, *layout)
    assert {case: each["verdict"] for case, each in result.items()} == {
        **dict.fromkeys(("healthy", "again", "stock_healthy"), "not_precision"),
        **dict.fromkeys(("narrow", "outlier", "cut", "part"), "rounding"),
        "hurried": "unfinished",
        **dict.fromkeys(("rows", "stale", "lost", "lost_gradient", "raced", "late", "unequal"), "bug"),
        **dict.fromkeys(("stock_rows", "stock_lost", "stock_lost_gradient"), "bug"),
    }
    assert {**result["healthy"], "seconds": 0} == {**result["again"], "seconds": 0}
    for case in ("narrow", "outlier"):
        assert result[case]["culprits"][0]["linear"] == LINEAR
        assert result[case]["culprits"][0]["confirmed"]
    assert {each["shard"] for each in result["narrow"]["culprits"]} == {None}
    worst = result["part"]["culprits"][0]
    assert (worst["linear"], worst["shard"]) == (LINEAR, 1)
    assert result["hurried"]["passes"].keys() == {"kernels"}, "one rank has no time, so that none goes on"
    assert "time of" in result["hurried"]["reason"]
    assert {each["linear"] for each in result["cut"]["culprits"] if each["confirmed"]} <= {LINEAR}
    assert result["healthy"]["microbatches"] == result["healthy"]["step_microbatches"] > 0
    bugs = {case: each["bug"] for case, each in result.items() if each["bug"]}
    assert {case: (bug["kind"], bug["linear"], bug["rank"]) for case, bug in bugs.items()} == {
        "rows": ("gemm", "decoder.layers.3.mlp.linear_fc2", 1),
        "stale": ("gemm", LINEAR, 0),
        "lost": ("reduction", "decoder.layers.0.self_attention.linear_proj", 1),
        "lost_gradient": ("reduction", "decoder.layers.3.mlp.linear_fc1", 1),
        "stock_rows": ("gemm", "decoder.layers.0.self_attention.linear_qkv", 1),
        "stock_lost": ("reduction", "decoder.layers.0.self_attention.linear_proj", 1),
        "stock_lost_gradient": ("reduction", "decoder.layers.3.mlp.linear_fc1", 1),
        "raced": ("gather", "decoder.layers.0.self_attention.linear_qkv", 1),
        "late": ("parameter", LINEAR, 1),
        "unequal": ("parameter", "decoder.layers.2.input_layernorm", 1),
    }
    assert bugs["rows"]["gemm"] == bugs["lost_gradient"]["gemm"] == "dgrad"
    assert "rows 125-127" in bugs["rows"]["where"]
    assert "rows 5-8" in bugs["late"]["where"]
    assert all(bug["host"] for bug in bugs.values())
    assert Path(tmp_path / bugs["rows"]["inputs"]).exists()
    assert not list(tmp_path.rglob("iter_*"))  # nothing is saved


def test_faults_of_virtual_pipelines(warm: WarmRanks, tmp_path: Path) -> None:
    layout = shlex.split("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1")
    result = verdicts(warm, tmp_path, 2, "healthy,narrow,rows,late", *layout)
    assert result["healthy"]["verdict"] == "not_precision"
    assert result["narrow"]["culprits"][0]["linear"] == LINEAR
    bugs = {case: each["bug"] for case, each in result.items() if each["bug"]}
    assert {case: (bug["kind"], bug["linear"], bug["rank"]) for case, bug in bugs.items()} == {
        "rows": ("gemm", "decoder.layers.3.mlp.linear_fc2", 1),
        "late": ("parameter", LINEAR, 1),
    }


def test_rows_of_experts(warm: WarmRanks, tmp_path: Path) -> None:
    result = verdicts(warm, tmp_path, 2, "healthy,part,offset", *EXPERTS, "--micro-batch-size", "1")
    assert result["healthy"]["verdict"] == "not_precision"
    worst = result["part"]["culprits"][0]
    assert (worst["linear"], worst["expert"]) == ("decoder.layers.1.mlp.experts.linear_fc1", 2)
    assert result["offset"]["bug"]["kind"] == "experts"
    assert (result["offset"]["bug"]["linear"], result["offset"]["bug"]["rank"]) == ("decoder.layers.1.mlp.experts", 1)
    assert result["offset"]["bug"]["expert"] == 2
