"""Mixtures of experts through the real entry, where the layouts' harness does not reach: of one expert, and starved."""

import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from agreement import agree, worst_differences
from launch import losses, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.precision import Format, Gemm
from snip_megatron.records.readers import read_maps, read_metrics
from snip_megatron.statistics.table import StatisticsTable

# 2 ranks × 8 tokens go to one of 32 experts each: at least 16 get none, in every microbatch.
STARVED = shlex.split(
    "--num-experts 32 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 32"
    " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --expert-model-parallel-size 2"
    " --num-layers 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 4"
)
SNIP = shlex.split(
    "--snip --snip-first-update 2 --snip-update-interval 100 --snip-lag 1 --snip-wait 120 --snip-budget fp4=0.9"
)


def test_experts_that_no_token_is_sent_to(warm: WarmRanks, tmp_path: Path) -> None:
    args = tiny_llama_args(*STARVED, *SNIP, "--snip-dir", str(tmp_path / "run"), iters=6)
    done = warm.run(2, args, tmp=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    curve = losses(done)
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
    """Every column, the map, and the losses under it."""
    tables, maps, figures = [], [], []
    for name, extra in (("dense", ()), ("one", ONE)):
        run = tmp_path / name / "run"
        args = tiny_llama_args(*PROBED, *extra, "--snip-dir", str(run), iters=5)
        done = warm.run(1, args, module="altered_pretrain", env={"ALTER": "one_expert"}, tmp=tmp_path / name)
        assert done.returncode == 0, done.stderr[-4000:]
        tables.append(StatisticsTable.load(run / "stats" / "step_2.npz"))
        (precision_map,) = read_maps(run).values()
        maps.append({key.replace(".experts.", "."): fmt for key, fmt in precision_map.choices.items()})
        figures.append(read_metrics(run))
    dense, one = tables
    assert [".experts." in row.name for row in one.linears] == [False, False, True, True] * 4
    same_rows = replace(one, linears=dense.linears)
    found = worst_differences(dense, same_rows)
    assert agree(found), found
    assert maps[0] == maps[1]
    for expected, actual in zip(*figures, strict=True):
        rounded = 1e-4 if expected["fp4_fraction"] else 1e-6  # formats round apart what differs in its last bit
        assert actual["loss"] == pytest.approx(expected["loss"], rel=rounded)
        assert actual["fp4_fraction"] == expected["fp4_fraction"]
    assert figures[0][-1]["fp4_fraction"] > 0.7


def test_exchanges_that_overlap_with_other_microbatches_change_nothing(warm: WarmRanks, tmp_path: Path) -> None:
    """Megatron runs parts of one microbatch's forward and another's backward in turn; probes run layer by layer."""
    mixture = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --num-layers 2 --moe-layer-freq [0,1]"
    given = f"{mixture} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --bf16 --micro-batch-size 1"
    runs = []
    for name, extra in (("plain", ()), ("overlapped", ("--overlap-moe-expert-parallel-comm",))):
        run = tmp_path / name
        args = tiny_llama_args(*given.split(), *SNIP, *extra, "--snip-dir", str(run), iters=5)
        done = warm.run(2, args, tmp=tmp_path / f"{name}-ranks")
        assert done.returncode == 0, done.stderr[-4000:]
        (adopted,) = read_maps(run).values()
        runs.append((adopted.choices, [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(run)]))
    assert runs[0] == runs[1]
