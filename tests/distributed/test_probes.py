"""Through the real entry: SNIP that quantises nothing is bitwise training without it, and probes leave no trace.

That what they measure does not depend on the parallel layout is in test_layout_matrix.py.
"""

import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import differences, read_checkpoint
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Llama
from snip_megatron.planner.updates import probe_passes
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_data import read_events
from snip_megatron.sensitivity.table import StatisticsTable

# Dropout, so that a lost or shifted random state shows.
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
LAYOUTS: dict[str, tuple[int, str]] = {
    "world-1": (1, ""),
    "tensor-and-sequence-bf16": (2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    # Two microbatches on each rank: gradients are reduced after the last one.
    "distributed-optimizer": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 1",
    ),
    # All that routers keep between forwards: jitter, biases, tokens counted for two of three auxiliary losses.
    "expert-parallel": (
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96"
        " --moe-layer-freq [0,1,1,0] --moe-token-dispatcher-type alltoall --moe-input-jitter-eps 0.05"
        " --moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-z-loss-coeff 0.001"
        " --moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 0.01 0.01"
        " --moe-expert-capacity-factor 1.25",
    ),
}
# Everything pinned to bf16: updates run, maps are solved and adopted, and change nothing.
PROBES = shlex.split(
    "--snip --snip-estimator noise "
    "--snip-budget fp4=0 --snip-pin *=bf16 --snip-first-update 3 --snip-update-interval 3 --snip-lag 2"
    " --snip-settings probe_tokens=48"
)
STEPS = 9  # two updates, adopted


class Runs:
    """Runs of :data:`STEPS` steps with a checkpoint at the end, each made once."""

    def __init__(self, warm: WarmRanks, folder: Path) -> None:
        self._warm, self.folder = warm, folder
        self.run = functools.cache(self._run)

    def _run(self, layout: str, *snip: str) -> tuple[dict[int, str], dict[str, Any], Path]:
        """(printed losses by step, everything in the checkpoint, the run directory)."""
        nproc, extra = LAYOUTS[layout]
        tmp = self.folder / f"{len(list(self.folder.iterdir()))}-{layout}"
        saving = ("--save", str(tmp / "checkpoint"), "--save-interval", str(STEPS))
        if "distributed-optimizer" in extra:
            saving += ("--dist-ckpt-optim-fully-reshardable",)
        args = tiny_llama_args(*DROPOUT, *extra.split(), *saving, *snip, iters=STEPS)
        process = self._warm.succeed(nproc, args, tmp=tmp)
        return printed_losses(process), read_checkpoint(tmp / "checkpoint", STEPS), tmp / "checkpoint" / "snip"


def printed_losses(process: subprocess.CompletedProcess[str]) -> dict[int, str]:
    """Step (from 1) → everything that Megatron prints of losses, auxiliary ones of experts included."""
    return {int(s): text for s, text in re.findall(r"iteration +(\d+)/.*?\| (lm loss: .*?) \| loss sc", process.stdout)}


@pytest.fixture(scope="module")
def runs(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(warm, tmp_path_factory.mktemp("probes"))


def assert_same(runs: Runs, layout: str, snip: tuple[str, ...]) -> None:
    """Losses, weights, moments, random states, schedules, the rerun machine: all that a checkpoint holds."""
    curve, plain, _ = runs.run(layout)
    assert len(curve) == STEPS
    curve_with_snip, with_snip, _ = runs.run(layout, *snip)
    assert curve_with_snip == curve
    assert any(name.startswith("optimizer.") for name in plain)
    assert any(name.startswith("rng_state") for name in plain)
    assert differences(plain, with_snip) == []


# -- bitwise ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "layout", [name if name == "pipeline" else pytest.param(name, marks=pytest.mark.matrix) for name in LAYOUTS]
)
def test_probes_leave_no_trace(runs: Runs, layout: str) -> None:
    """Under the other layouts test_transactions.py shows it, with updates that fail before they succeed."""
    assert_same(runs, layout, tuple(PROBES))
    _, _, directory = runs.run(layout, *PROBES)
    events = list(read_events(directory))
    probes = [(event["step"], event["kind"]) for event in events if event["event"] == "probe"]
    # A busy machine may still be solving when the next update is due, which is then left out.
    assert probes[:2] == [(3, kind) for kind in ("statistics", "forward_noise")]
    assert len(probes) % 2 == 0
    assert all(event["changed"] == 0 for event in events if event["event"] == "adopt")


# -- the same as was planned ---------------------------------------------------------------------------------
def test_snip_plan_counts_the_passes_that_an_update_runs(runs: Runs) -> None:
    _, _, directory = runs.run("pipeline", *PROBES)
    events = [event for event in read_events(directory) if event["event"] == "probe"]
    tiny = Llama("tiny", 4, 64, 192, 4, 2, 16, vocabulary=255, context=64).model(2)
    planned = probe_passes(Layout(tiny, 1, 2, 1, 1, 64, 2, 4), SnipConfig(enabled=True, estimator="noise"))
    first = events[0]["step"]
    assert planned == {e["kind"]: e["passes"] for e in events if e["step"] == first}


def test_a_map_that_quantises_does_leave_one(runs: Runs) -> None:
    """What the comparisons above would say if a single linear were not bf16."""
    _, plain, _ = runs.run("world-1")
    _, changed, _ = runs.run("world-1", "--snip", "--snip-policy", "bf16", "--snip-pin", "*.0.mlp.linear_fc1=fp8")
    assert "decoder.layers.mlp.linear_fc1.weight" in differences(plain, changed)


# -- the scale of gradients ------------------------------------------------------------------------------------
MEASURE_ONCE = (
    "--snip",
    "--snip-estimator",
    "noise",
    "--snip-first-update",
    "1",
    "--snip-update-interval",
    "100",
    "--snip-lag",
    "2",
)


def test_tokens_that_the_loss_leaves_out_do_not_scale_gradients(warm: WarmRanks, tmp_path: Path) -> None:
    """Megatron divides a loss per token by the tokens under the mask. A single microbatch divides it alike."""
    expected = probed_table(warm, tmp_path / "mean", 1, "--micro-batch-size", "4")
    assert expected.tokens == 4 * 64
    for name, layout in (("data", ""), ("pipeline", "--pipeline-model-parallel-size 2 --snip-probe-microbatches 2")):
        found = probed_table(warm, tmp_path / name, 2, "--calculate-per-token-loss", *layout.split())
        for column in ("linear.g2", "boundary.r2"):  # of a mean over T tokens: in proportion to 1/T
            measured, wanted = (table.arrays[column].sum() * table.tokens for table in (found, expected))
            assert measured == pytest.approx(wanted, rel=0.2), (name, column)


def test_the_scale_of_a_loss_scales_no_statistic(warm: WarmRanks, tmp_path: Path) -> None:
    expected = probed_table(warm, tmp_path / "bf16", 1, "--bf16").arrays
    scaled = probed_table(warm, tmp_path / "scaled", 1, "--bf16", "--loss-scale", "1024").arrays
    assert all(np.array_equal(array, scaled[name], equal_nan=True) for name, array in expected.items())
    fp16 = probed_table(warm, tmp_path / "fp16", 1, "--fp16", "--initial-loss-scale", "1024").arrays
    for column in ("linear.x2", "linear.g2", "linear.gw2", "by_format.wdrift2"):
        assert fp16[column].sum() == pytest.approx(expected[column].sum(), rel=0.05), column


def probed_table(warm: WarmRanks, tmp: Path, ranks: int, *arguments: str) -> StatisticsTable:
    """The statistics of the first update, before step 1."""
    args = tiny_llama_args(*MEASURE_ONCE, *arguments, "--snip-dir", str(tmp / "run"), iters=4)
    warm.succeed(ranks, args, tmp=tmp, module="altered_pretrain", env={"ALTER": "mask"})
    return StatisticsTable.load(tmp / "run" / "stats" / "step_1.npz")
