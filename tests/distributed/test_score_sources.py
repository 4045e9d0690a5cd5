"""What scores are made of, in real runs: drift of other optimizers, natural noise of gradients; and
maps whose groups share a format."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from agreement import agree, worst_differences
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.sensitivity.table import RHO_GRID, StatisticsTable

pytest.importorskip("emerging_optimizers")

AT = 2
PROBE = shlex.split(
    f"--snip --snip-estimator noise --snip-first-update {AT} --snip-update-interval 1000 --snip-lag 6"
    f" --snip-settings probe_tokens=48 --exit-interval {AT + 1}"
)
# Tiles fall alike on two ranks: every shard is a multiple of 128.
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 2 --global-batch-size 4"
)
TENSOR = "--tensor-model-parallel-size 2 --muon-tp-mode duplicated"


def table_of(warm: WarmRanks, tmp: Path, nproc: int, microbatches: int, extra: str, alter: str = "") -> StatisticsTable:
    """Statistics before step AT; ranks begin with equal weights without pipeline stages."""
    run = ("--snip-dir", str(tmp / "run"), "--snip-probe-microbatches", str(microbatches))
    arguments = tiny_llama_args(*MODEL, *PROBE, *run, *extra.split(), iters=9)
    warm.succeed(nproc, arguments, module="altered_pretrain", env={"ALTER": alter}, tmp=tmp)
    return StatisticsTable.load(tmp / "run" / "stats" / f"step_{AT}.npz")


def test_drift_of_muon_on_two_layouts(warm: WarmRanks, tmp_path: Path) -> None:
    """Two steps in, weights differ in the last bits; drift of the smallest errors is a difference of close numbers."""
    one = table_of(warm, tmp_path / "one", 1, 2, "--optimizer muon")
    two = table_of(warm, tmp_path / "two", 2, 2, f"--optimizer muon {TENSOR}")
    assert one.non_finite() == []
    assert (one.arrays["drift2"] > 0).all()
    assert (one.arrays["sink_drift2"] > 0).all()
    assert (np.abs(two.arrays["drift2"] / one.arrays["drift2"] - 1.0) < 1e-3 * np.maximum(1.0, 1e-2 / RHO_GRID)).all()
    np.testing.assert_allclose(two.by_format["wdrift2"], one.by_format["wdrift2"], rtol=1e-3)


def test_drift_where_ranks_share_out_whole_parameters(warm: WarmRanks, tmp_path: Path) -> None:
    """Megatron's layer-wise distributed optimizer, which these get with --use-distributed-optimizer.

    It takes 16-bit weights only. They stay where they are, or a last bit of a step would be a last bit of bf16.
    """
    still = "--optimizer lion --bf16 --lr 1e-20 --min-lr 0"
    one = table_of(warm, tmp_path / "one", 1, 2, still)
    two = table_of(
        warm,
        tmp_path / "two",
        2,
        1,
        f"{still} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    )
    assert two.non_finite() == []
    assert (two.arrays["drift2"][:, -1] > 0).all()
    found = worst_differences(one, two)
    assert agree(found), found


def test_drift_of_an_optimizer_on_the_host(warm: WarmRanks, tmp_path: Path) -> None:
    adam = "--bf16 --use-distributed-optimizer"
    host = f"{adam} --use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 1.0"
    device = table_of(warm, tmp_path / "device", 2, 1, adam)
    offloaded = table_of(warm, tmp_path / "host", 2, 1, host, alter="offload")
    assert (device.arrays["drift2"] > 0).all()
    for name in ("drift2", "by_format.wdrift2"):
        np.testing.assert_allclose(offloaded.arrays[name], device.arrays[name], rtol=1e-3, err_msg=name)
