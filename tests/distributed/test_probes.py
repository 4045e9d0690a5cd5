"""What a probe measures does not depend on how Megatron scales a loss, nor on where the optimizer is.

test_layout_matrix.py shows that it does not depend on the layout either, test_transactions.py that it leaves no trace.
"""

import shlex
from pathlib import Path

import numpy as np
import pytest
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.sensitivity.table import StatisticsTable

MEASURE_ONCE = shlex.split(
    "--snip --snip-estimator noise --snip-first-update 1 --snip-update-interval 100 --snip-lag 2"
)


def test_tokens_that_the_loss_leaves_out_do_not_scale_gradients(warm: WarmRanks, tmp_path: Path) -> None:
    """Megatron divides a loss per token by the tokens under the mask. A single microbatch divides it alike."""
    expected = probed_table(warm, tmp_path / "mean", 1, "--micro-batch-size", "4")
    assert expected.tokens == 4 * 64
    for name, layout in (("data", ""), ("pipeline", "--pipeline-model-parallel-size 2 --snip-probe-microbatches 2")):
        actual = probed_table(warm, tmp_path / name, 2, "--calculate-per-token-loss", *layout.split())
        for column in ("linear.g2", "boundary.r2"):  # of a mean over T tokens: in proportion to 1/T
            measured, reference = (table.arrays[column].sum() * table.tokens for table in (actual, expected))
            assert measured == pytest.approx(reference, rel=0.2), (name, column)


def test_the_scale_of_a_loss_scales_no_statistic(warm: WarmRanks, tmp_path: Path) -> None:
    expected = probed_table(warm, tmp_path / "bf16", 1, "--bf16").arrays
    scaled = probed_table(warm, tmp_path / "scaled", 1, "--bf16", "--loss-scale", "1024").arrays
    assert all(np.array_equal(array, scaled[name], equal_nan=True) for name, array in expected.items())
    fp16 = probed_table(warm, tmp_path / "fp16", 1, "--fp16", "--initial-loss-scale", "1024").arrays
    for column in ("linear.x2", "linear.g2", "linear.gw2", "by_format.wdrift2"):
        assert fp16[column].sum() == pytest.approx(expected[column].sum(), rel=0.05), column


def test_an_optimizer_on_the_host_has_the_update_errors_of_one_on_the_device(warm: WarmRanks, tmp_path: Path) -> None:
    sharded = ("--bf16", "--use-distributed-optimizer")
    on_the_host = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 1.0"
    device = probed_table(warm, tmp_path / "device", 2, *sharded).arrays
    host = probed_table(warm, tmp_path / "host", 2, *sharded, *on_the_host.split(), alter="mask,offload").arrays
    assert (device["drift2"] > 0).all()
    for name in ("drift2", "by_format.wdrift2"):
        np.testing.assert_allclose(host[name], device[name], rtol=1e-3, err_msg=name)


def probed_table(warm: WarmRanks, tmp: Path, ranks: int, *arguments: str, alter: str = "mask") -> StatisticsTable:
    """The statistics of the first update, before step 1."""
    args = tiny_llama_args(*MEASURE_ONCE, *arguments, "--snip-dir", str(tmp / "run"), iters=4)
    warm.succeed(ranks, args, tmp=tmp, module="altered_pretrain", env={"ALTER": alter})
    return StatisticsTable.load(tmp / "run" / "stats" / "step_1.npz")
