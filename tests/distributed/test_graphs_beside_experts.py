"""Experts outside of Transformer Engine's graphs, through Megatron's own helper; graphs on a GPU: ``tests/gpu``."""

import json
import shlex
from pathlib import Path

import pytest
from launch import error_lines, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.runtime.exchange import EXIT_UPDATE_BROKEN
from snip_megatron.runtime.run_data import read_maps, read_metrics

LAYERS = [0, 1]
EXPERTS = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"
    " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-shared-expert-intermediate-size 64"
    " --moe-layer-freq [0,1] --num-layers 2 --bf16 --transformer-impl local --global-batch-size 8"
)
SNIP = shlex.split(
    "--snip --snip-estimator noise "
    "--snip-budget fp4=0.5 --snip-first-update 3 --snip-update-interval 6 --snip-lag 2 --snip-wait 120"
)
GRAPHS = shlex.split("--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess")


def test_graphs_hold_all_but_the_experts_and_follow_the_map(warm: WarmRanks, tmp_path: Path) -> None:
    curves = []
    for name, extra in (("eager", []), ("graphed", GRAPHS)):
        args = tiny_llama_args(*EXPERTS, *SNIP, *extra, "--snip-dir", str(tmp_path / name), iters=12)
        env = {"CAPTURES": str(tmp_path / f"{name}.json")}
        warm.succeed(1, args, module="altered_pretrain", env=env, tmp=tmp_path)
        curves.append([(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name)])
    eager, graphed = curves
    assert len(graphed) == 12
    assert graphed == [pytest.approx(figures, rel=1e-4) for figures in eager]

    calls, replayed = json.loads((tmp_path / "graphed.json").read_text())
    assert replayed == list(range(3, 12)), "probes run without graphs"
    attention = ["self_attention.linear_proj", "self_attention.linear_qkv"]
    shared = ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    held = [[f"decoder.layers.{layer}.{path}" for path in (shared * (layer > 0) + attention)] for layer in LAYERS]
    assert [call["held"] for call in calls] == [[held[layer] for layer in call["layers"]] for call in calls]

    first, second = read_maps(tmp_path / "graphed").values()
    held_by_any = {name for names in held for name in names}
    changed = {str(name) for name in first.linears() if first.formats_of(str(name)) != second.formats_of(str(name))}
    assert changed, "the second map is another one"
    assert [call["layers"] for call in calls] == [LAYERS] * (3 if changed & held_by_any else 2)


def test_a_capture_that_fails_at_an_adoption_ends_in_one_line(warm: WarmRanks, tmp_path: Path) -> None:
    args = tiny_llama_args(*EXPERTS, *SNIP, *GRAPHS, "--snip-dir", str(tmp_path / "run"), iters=12)
    failure = [5, 0, "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.create_cudagraphs", "OutOfMemoryError"]
    env = {"CAPTURES": str(tmp_path / "captures"), "ALTER": "fail", "FAIL": json.dumps([failure])}
    ended = warm.run(1, args, module="altered_pretrain", env=env, tmp=tmp_path)
    assert ended.returncode == EXIT_UPDATE_BROKEN
    (line,) = error_lines(ended)
    assert "adoption: OutOfMemoryError: injected into create_cudagraphs; SNIP's work of step 5 failed" in line
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(4))  # step 4's come with step 5's
    assert list(read_maps(tmp_path / "run")) == [5]
