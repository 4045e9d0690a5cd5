"""Mixtures of experts through the real entry, where the layouts' harness does not reach: of one expert, starved, and
with the dispatchers, routings and recomputation that people train them with. Other models and optimizers of the field
beside them.
"""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agreement import agree, worst_differences
from altered_pretrain import traced
from launch import losses, tiny_llama_args
from layouts import figures
from resumes import EXPERTS, LATENT
from warm_ranks import WarmRanks

from snip_megatron.precision import Format, Gemm
from snip_megatron.runtime.run_data import read_maps, read_metrics
from snip_megatron.sensitivity.table import StatisticsTable

# 2 ranks × 8 tokens go to one of 32 experts each: at least 16 get none, in every microbatch.
STARVED = shlex.split(
    "--num-experts 32 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 32"
    " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --expert-model-parallel-size 2"
    " --num-layers 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 4"
)
SNIP = shlex.split(
    "--snip --snip-estimator noise "
    "--snip-first-update 2 --snip-update-interval 100 --snip-lag 1 --snip-wait 120 --snip-budget fp4=0.9"
)


def test_experts_that_no_token_is_sent_to(warm: WarmRanks, tmp_path: Path) -> None:
    args = tiny_llama_args(*STARVED, *SNIP, "--snip-dir", str(tmp_path / "run"), iters=6)
    process = warm.succeed(2, args, tmp=tmp_path)
    curve = losses(process)
    assert len(curve) == 6
    assert all(math.isfinite(loss) for loss in curve.values())
    table = StatisticsTable.load(tmp_path / "run" / "stats" / "step_2.npz")
    assert table.non_finite() == []
    rows = [i for i, row in enumerate(table.linears) if row.experts > 1]
    assert [(table.linears[i].experts, table.linears[i].active) for i in rows] == [(32, 1)] * 4
    for column in ("x2", "w2", "g2", "d2", "gw2", "s2"):
        assert (table.linear[column][rows] > 0).all(), column
    assert (table.by_format["wdrift2"][rows] > 0).all()
    (precision_map,) = read_maps(tmp_path / "run").values()
    formats = {precision_map.format_of(table.linears[i].name, gemm) for i in rows for gemm in Gemm}
    assert Format.FP4 in formats


ONE = shlex.split(
    "--num-experts 1 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 192"
    " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
)
PROBED = shlex.split(
    "--snip --snip-first-update 2 --snip-update-interval 100 --snip-lag 1 --snip-wait 120"
    " --snip-probe-microbatches 2 --global-batch-size 4"
)


def test_a_mixture_of_one_expert_is_the_dense_decoder(warm: WarmRanks, tmp_path: Path) -> None:
    """Their statistics agree column by column, and so do their maps and the losses under them."""
    tables, maps, metrics = [], [], []
    for name, extra in (("dense", ()), ("one", ONE)):
        run = tmp_path / name / "run"
        args = tiny_llama_args(*PROBED, *extra, "--snip-dir", str(run), iters=5)
        warm.succeed(1, args, module="altered_pretrain", env={"ALTER": "one_expert"}, tmp=tmp_path / name)
        tables.append(StatisticsTable.load(run / "stats" / "step_2.npz"))
        (precision_map,) = read_maps(run).values()
        maps.append({key.replace(".experts.", "."): fmt for key, fmt in precision_map.choices.items()})
        metrics.append(read_metrics(run))
    dense, mixture = tables
    assert [".experts." in row.name for row in mixture.linears] == [False, False, True, True] * 4
    same_rows = replace(mixture, linears=dense.linears)
    result = worst_differences(dense, same_rows)
    assert agree(result), result
    assert maps[0] == maps[1]
    for expected, actual in zip(*metrics, strict=True):
        rounded = 1e-4 if expected["fp4_fraction"] else 1e-6  # formats round apart what differs in its last bit
        assert actual["loss"] == pytest.approx(expected["loss"], rel=rounded)
        assert actual["fp4_fraction"] == expected["fp4_fraction"]
    assert metrics[0][-1]["fp4_fraction"] > 0.7


def test_exchanges_that_overlap_with_other_microbatches_change_nothing(warm: WarmRanks, tmp_path: Path) -> None:
    """Megatron runs parts of one microbatch's forward and another's backward in turn; probes run layer by layer."""
    mixture = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --num-layers 2 --moe-layer-freq [0,1]"
    arguments = (
        f"{mixture} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --bf16 --micro-batch-size 1"
    )
    runs = []
    for name, extra in (("plain", ()), ("overlapped", ("--overlap-moe-expert-parallel-comm",))):
        run = tmp_path / name
        args = tiny_llama_args(*arguments.split(), *SNIP, *extra, "--snip-dir", str(run), iters=5)
        warm.succeed(2, args, tmp=tmp_path / f"{name}-ranks")
        (adopted,) = read_maps(run).values()
        runs.append((adopted.choices, figures(run)))
    assert runs[0] == runs[1]


EP2, SHARED = "--expert-model-parallel-size 2", "--moe-shared-expert-intermediate-size 96"
BESIDE = f"{SHARED} --moe-shared-expert-overlap"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTED = "--recompute-granularity selective --recompute-modules"
SINKHORN = EXPERTS.replace("aux_loss --moe-aux-loss-coeff 0.01", "sinkhorn").replace("-topk 2", "-topk 1")
GROUPS = "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-score-function sigmoid"
DELTA = (
    "--transformer-impl local --spec hybrid_stack stack --hybrid-layer-pattern GE*- --deterministic-mode"
    " --linear-conv-kernel-dim 4 --linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 2"
    " --linear-num-value-heads 4"
)
_ATTENTION: list[dict[str, Any]] = [{}, {"replace_with_linear": True}, {}, {"no_op": True}]
_MLPS: list[dict[str, Any]] = [{}, {}, {"no_op": True}, {"replace_with_linear": True}]
_BLOCKS = [
    {"attention": {"n_heads_in_group": None if attention else 2, **attention}, "ffn": {"ffn_hidden_size": 96, **mlp}}
    for attention, mlp in zip(_ATTENTION, _MLPS, strict=True)
]
_OF_BLOCKS = {
    "hidden_act": "silu", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 10000,
    "tie_word_embeddings": False, "rope_scaling": {"factor": 8.0}, "block_configs": _BLOCKS,
}  # fmt: skip
HETEROGENEOUS = (
    f"--heterogeneous-layers-config-encoded-json {shlex.quote(json.dumps(_OF_BLOCKS))} --use-rope-scaling"
    " --use-rotary-position-embeddings"
)
KINDS = {
    "heterogeneous": f"{HETEROGENEOUS} {TP2}",
    "muon": f"--optimizer muon {TP2}",
    "hybrid": f"{EXPERTS.replace(' --num-layers 2 --moe-layer-freq [0,1]', '')} {EP2} {SHARED} {DELTA}",
    "latent-recomputed": f"{LATENT} {EXPERTS} {EP2} {BESIDE} {RECOMPUTED} mla_up_proj",
    "shared-overlapped-tp": f"{EXPERTS} {TP2} {EP2} --expert-tensor-parallel-size 1 {BESIDE}",
    "expert-tensor-parallel": f"{EXPERTS} {TP2}",
    "allgather": f"{EXPERTS.replace('alltoall', 'allgather')} {EP2}",
    "sinkhorn": f"{SINKHORN} {EP2}",
    "groups": f"{EXPERTS.replace('aux_loss', 'seq_aux_loss')} {EP2} {GROUPS} --moe-router-enable-expert-bias",
    "global-balance": f"{EXPERTS.replace('aux_loss', 'global_aux_loss')} {EP2}",
    "recomputed": f"{EXPERTS} {EP2} {SHARED} {RECOMPUTED} moe",
    "shared-recomputed": f"{EXPERTS} {EP2} {SHARED} {RECOMPUTED} shared_experts mlp",
}
FAST = ("heterogeneous", "hybrid", "latent-recomputed")


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS]
)
def test_an_all_bf16_map_is_stock_bit_for_bit_and_updated_maps_train_nearly_so(
    warm: WarmRanks, tmp_path: Path, kind: str
) -> None:
    result = []
    updates = [*SNIP, "--snip-estimator", "fisher"] if kind == "muon" else SNIP
    for name, snip in (("stock", []), ("bf16", ["--snip", "--snip-policy", "bf16"]), ("updated", updates)):
        words = shlex.split(f"--bf16 --use-distributed-optimizer --global-batch-size 8 {KINDS[kind]}")
        run = ["--snip-dir", str(tmp_path / name / "run")] if snip else []
        result.append(traced(warm, 2, tiny_llama_args(*words, *snip, *run, iters=6), tmp_path / name)[-1])
    stock, bf16, updated = result
    assert bf16 == stock
    first, last = (float.fromhex(stock["losses"][step]) for step in (1, 6))
    assert updated["losses"][6] != stock["losses"][6]
    assert float.fromhex(updated["losses"][6]) == pytest.approx(last, abs=0.05 * (first - last))
