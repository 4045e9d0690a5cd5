"""What scores are made of, in real runs: drift of other optimizers, Hessian traces, natural noise of gradients; and
maps whose groups share a format."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agreement import agree, worst_differences
from launch import error_lines, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.precision import Format, Gemm
from snip_megatron.records.readers import read_events, read_maps
from snip_megatron.statistics.table import RHO_GRID, StatisticsTable

pytest.importorskip("emerging_optimizers")

AT = 2
PROBE = shlex.split(
    f"--snip --snip-first-update {AT} --snip-update-interval 1000 --snip-lag 500 --snip-probe-tokens 48"
    f" --exit-interval {AT + 1}"
)
# Tiles fall alike on two ranks: every shard is a multiple of 128.
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 2 --global-batch-size 4"
)
TENSOR = "--tensor-model-parallel-size 2 --muon-tp-mode duplicated"


def table_of(warm: WarmRanks, tmp: Path, nproc: int, microbatches: int, extra: str) -> StatisticsTable:
    """Statistics before step AT; ranks begin with equal weights without pipeline stages."""
    run = ("--snip-dir", str(tmp / "run"), "--snip-probe-microbatches", str(microbatches))
    process = warm.run(nproc, tiny_llama_args(*MODEL, *PROBE, *run, *extra.split(), iters=9), tmp=tmp)
    assert process.returncode == 0, process.stderr[-4000:]
    return StatisticsTable.load(tmp / "run" / "stats" / f"step_{AT}.npz")


@pytest.mark.parametrize(
    ("optimizer", "microbatches", "layout"),
    [("sgd", 1, ""), ("muon", 2, TENSOR)],
)
def test_drift_of_other_optimizers_on_two_layouts(
    warm: WarmRanks, tmp_path: Path, optimizer: str, microbatches: int, layout: str
) -> None:
    """Two steps in, weights differ in the last bits; drift of the smallest errors is a difference of close numbers."""
    one = table_of(warm, tmp_path / "one", 1, 2, f"--optimizer {optimizer}")
    two = table_of(warm, tmp_path / "two", 2, microbatches, f"--optimizer {optimizer} {layout}")
    assert one.non_finite() == []
    assert (one.drift2 > 0).all()
    assert (one.sink_drift2 > 0).all()
    assert (np.abs(two.drift2 / one.drift2 - 1.0) < 1e-3 * np.maximum(1.0, 1e-2 / RHO_GRID)).all()
    for name in ("linear.gv2", "by_format.wdrift2", "linear.m2"):
        np.testing.assert_allclose(two.arrays()[name], one.arrays()[name], rtol=1e-3, err_msg=name)
    if optimizer == "sgd":  # linear in the error, and without a second moment
        np.testing.assert_allclose(one.drift2 / one.drift2[:, :1], np.tile((RHO_GRID / RHO_GRID[0]) ** 2, (8, 1)))
    assert not one.linear["v2"].any()
    # Tokens of a sequence are not independent: the variance over microbatches is of another size than theirs.
    assert (one.linear["gv2"] > 0.2 * one.linear["s2"]).all()
    assert (one.linear["gv2"] < 20.0 * one.linear["s2"]).all()


@pytest.mark.parametrize(
    ("optimizer", "overlap"), [("muon", ""), ("lion", "--overlap-grad-reduce --overlap-param-gather")]
)
def test_drift_where_ranks_share_out_whole_parameters(
    warm: WarmRanks, tmp_path: Path, optimizer: str, overlap: str
) -> None:
    """Megatron's layer-wise distributed optimizer, which these get with --use-distributed-optimizer.

    It takes 16-bit weights only. They stay where they are, or a last bit of a step would be a last bit of bf16.
    """
    still = f"--optimizer {optimizer} --bf16 --lr 1e-20 --min-lr 0"
    one = table_of(warm, tmp_path / "one", 1, 2, still)
    two = table_of(warm, tmp_path / "two", 2, 1, f"{still} --use-distributed-optimizer {overlap}")
    assert two.non_finite() == []
    assert (two.linear["m2"] > 0).all()
    assert (two.drift2[:, -1] > 0).all()
    # The second microbatch of one rank is multiplied out once more, in bf16.
    np.testing.assert_allclose(two.linear["gv2"], one.linear["gv2"], rtol=1e-3)
    two = replace(two, linear=dict(two.linear, gv2=one.linear["gv2"]))
    found = worst_differences(one, two)
    assert agree(found), found


def test_hessian_traces_on_three_layouts(warm: WarmRanks, tmp_path: Path) -> None:
    hawq = "--snip-policy hawq --snip-hessian-probes 2"
    one = table_of(warm, tmp_path / "one", 1, 2, hawq).linear["htrace"]
    assert (one > 0).sum() >= 6
    for name, microbatches, layout in (("tensor", 2, f"{TENSOR} --sequence-parallel"), ("data", 1, "")):
        two = table_of(warm, tmp_path / name, 2, microbatches, f"{hawq} {layout}").linear["htrace"]
        np.testing.assert_allclose(two, one, rtol=2e-2, atol=1e-2 * one.max(), err_msg=name)


def test_groups_hold_on_every_stage(warm: WarmRanks, tmp_path: Path) -> None:
    """One group over both stages, one in each block."""
    specs = ("*linear_fc2", "block:*.self_attention.*")
    groups = [argument for spec in specs for argument in ("--snip-group", spec)]
    snip = shlex.split("--snip --snip-first-update 2 --snip-update-interval 6 --snip-lag 2 --snip-wait 120")
    stages = ("--pipeline-model-parallel-size", "2", "--snip-stage-tolerance", "0.1", "--snip-budget", "fp4=0.6")
    run = tmp_path / "run"
    args = tiny_llama_args(*snip, *groups, *stages, "--snip-dir", str(run), iters=12)
    process = warm.run(2, args, tmp=tmp_path)
    assert process.returncode == 0, process.stderr[-4000:]
    maps = read_maps(run)
    assert len(maps) >= 2
    for found in maps.values():
        assert found.status == "optimal"
        assert min(found.achieved_per_stage.values()) >= 0.5
        for gemm in Gemm:
            assert len({found.format_of(f"decoder.layers.{i}.mlp.linear_fc2", gemm) for i in range(4)}) == 1
            for i in range(4):
                block = f"decoder.layers.{i}.self_attention.linear"
                assert found.format_of(f"{block}_qkv", gemm) is found.format_of(f"{block}_proj", gemm)
        formats = {found.format_of(str(linear), gemm) for linear in found.linears() for gemm in Gemm}
        assert formats == {Format.FP8, Format.FP4}
    assert [event["event"] for event in read_events(run)].count("solve_failed") == 0


def test_pins_that_contradict_in_a_group_end_the_start(warm: WarmRanks, tmp_path: Path) -> None:
    snip = shlex.split("--snip --snip-group *.0.mlp.* --snip-pin *.0.mlp.linear_fc1=bf16 --snip-pin *.0.*fc2=fp8")
    process = warm.run(1, tiny_llama_args(*snip, iters=2), tmp=tmp_path)
    assert process.returncode == 2
    (line,) = error_lines(process)
    assert "decoder.layers.0.mlp.linear_fc1:fprop to bf16 and decoder.layers.0.mlp.linear_fc2:fprop to fp8" in line
