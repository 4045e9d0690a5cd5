"""Through the real entry: SNIP that quantises nothing is bitwise training without it, probes leave no trace, and what
they measure does not depend on the parallel layout."""

from __future__ import annotations

import functools
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import differences, read_checkpoint
from launch import losses, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.reporting.readers import read_events
from snip_megatron.statistics.table import RHO_GRID, StatisticsTable

# Dropout, so that a lost or shifted random state shows.
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
LAYOUTS: dict[str, tuple[int, str]] = {
    "world-1": (1, ""),
    "tensor-and-sequence-bf16": (2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "distributed-optimizer": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
}
ALL_BF16 = ("--snip", "--snip-policy", "bf16")
# Everything pinned to bf16: updates run, maps are solved and adopted, and change nothing.
PROBES = shlex.split(
    "--snip --snip-budget fp4=0 --snip-pin *=bf16 --snip-first-update 3 --snip-update-interval 6 --snip-lag 3"
    " --snip-backward-noise --snip-probe-tokens 48"
)
# Options forced alone; what follows from them is still on its way when the run ends.
MEASUREMENT = shlex.split(
    "--snip --snip-estimator measured --snip-measured-share 0.1 --snip-measured-twice --snip-first-update 3"
    " --snip-update-interval 100 --snip-lag 50 --snip-probe-tokens 48"
)
STEPS = 20


def check(process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 0, process.stderr[-4000:]


class Runs:
    """Runs of 20 steps with a checkpoint at the end, each made once."""

    def __init__(self, warm: WarmRanks, folder: Path) -> None:
        self._warm, self.folder = warm, folder
        self.run = functools.cache(self._run)

    def _run(self, layout: str, *snip: str) -> tuple[dict[int, float], dict[str, Any], Path]:
        """(printed losses by step, everything in the checkpoint, the run directory)."""
        nproc, extra = LAYOUTS[layout]
        tmp = self.folder / f"{len(list(self.folder.iterdir()))}-{layout}"
        saving = ("--save", str(tmp / "checkpoint"), "--save-interval", str(STEPS))
        if "distributed-optimizer" in extra:
            saving += ("--dist-ckpt-optim-fully-reshardable",)
        args = tiny_llama_args(*DROPOUT, *extra.split(), *saving, *snip, iters=STEPS)
        process = self._warm.run(nproc, args, tmp=tmp)
        check(process)
        return losses(process), read_checkpoint(tmp / "checkpoint", STEPS), tmp / "checkpoint" / "snip"


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
@pytest.mark.parametrize("layout", ["world-1", "tensor-and-sequence-bf16"])
def test_an_all_bf16_map_without_updates_is_training_without_snip(runs: Runs, layout: str) -> None:
    assert_same(runs, layout, ALL_BF16)
    _, _, directory = runs.run(layout, *ALL_BF16)
    assert [event["event"] for event in read_events(directory)] == ["adopt"]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_probes_leave_no_trace(runs: Runs, layout: str) -> None:
    assert_same(runs, layout, tuple(PROBES))
    _, _, directory = runs.run(layout, *PROBES)
    events = list(read_events(directory))
    probes = [(event["step"], event["kind"]) for event in events if event["event"] == "probe"]
    # A busy machine may still be solving when the next update is due, which is then left out.
    assert probes[:3] == [(3, kind) for kind in ("statistics", "forward_noise", "backward_noise")]
    assert len(probes) % 3 == 0
    assert all(event["changed"] == 0 for event in events if event["event"] == "adopt")


@pytest.mark.parametrize("layout", ["tensor-and-sequence-bf16", "distributed-optimizer"])
def test_moved_weights_leave_no_trace(runs: Runs, layout: str) -> None:
    """Policy hawq: passes with weights that are not the model's."""
    hawq = (*PROBES, "--snip-policy", "hawq", "--snip-hessian-probes", "2")
    assert_same(runs, layout, hawq)
    _, _, directory = runs.run(layout, *hawq)
    kinds = [event["kind"] for event in read_events(directory) if event["event"] == "probe"]
    assert kinds[:2] == ["statistics", "hessian"]


@pytest.mark.parametrize("layout", ["tensor-and-sequence-bf16", "pipeline", "distributed-optimizer"])
def test_options_forced_alone_leave_no_trace(runs: Runs, layout: str) -> None:
    assert_same(runs, layout, tuple(MEASUREMENT))
    _, _, directory = runs.run(layout, *MEASUREMENT)
    probes = [event for event in read_events(directory) if event["event"] == "probe"]
    assert [event["kind"] for event in probes] == ["statistics", "forward_noise", "measured"]
    # A nudge, four linears and all wgrads in two formats: an on and an off pass each, and one of none; all twice.
    assert probes[-1]["passes"] == 2 * (2 * (1 + 4 * 2 + 2) + 1)


def test_a_map_that_quantises_does_leave_one(runs: Runs) -> None:
    """What the comparisons above would say if a single linear were not bf16."""
    _, plain, _ = runs.run("world-1")
    _, changed, _ = runs.run("world-1", "--snip", "--snip-policy", "bf16", "--snip-pin", "*.0.mlp.linear_fc1=fp8")
    assert "decoder.layers.mlp.linear_fc1.weight" in differences(plain, changed)


# -- statistics ------------------------------------------------------------------------------------------------
# Every shard, gated half, query group and token share is a multiple of 128: tiles fall alike on all layouts.
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 2 --global-batch-size 4"
)
AT = 3  # the step before which the probe runs
PROBE = shlex.split(
    f"--snip --snip-first-update {AT} --snip-update-interval 1000 --snip-lag 500 --snip-backward-noise"
    f" --snip-probe-tokens 96 --exit-interval {AT + 1}"
)
SHARDED_OPTIMIZER = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
# ranks, microbatches of the probe on each data parallel rank (always two in all), arguments
TABLE_LAYOUTS: dict[str, tuple[int, int, str]] = {
    "world-1": (1, 2, ""),
    "tensor": (2, 2, "--tensor-model-parallel-size 2"),
    "tensor-and-sequence": (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, 2, "--pipeline-model-parallel-size 2"),
    "data": (2, 1, ""),
    "data-per-token-loss": (2, 1, "--calculate-per-token-loss"),
    "data-distributed-optimizer": (2, 1, SHARDED_OPTIMIZER),
    "full-recompute": (1, 2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
}


@pytest.fixture(scope="module")
def tables(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StatisticsTable]:
    """The same probe on every layout, from the same weights and moments: a checkpoint of one rank."""
    folder = tmp_path_factory.mktemp("tables")
    for optimizer in ("", SHARDED_OPTIMIZER):  # Megatron does not load one kind into the other
        saving = ["--save", str(folder / f"warm{optimizer}"), "--save-interval", str(AT), "--exit-interval", str(AT)]
        check(warm.run(1, tiny_llama_args(*MODEL, *saving, *optimizer.split(), iters=9), tmp=folder / "save"))
    found = {}
    for name, (nproc, microbatches, extra) in TABLE_LAYOUTS.items():
        optimizer = SHARDED_OPTIMIZER if SHARDED_OPTIMIZER in extra else ""
        loading = ["--load", str(folder / f"warm{optimizer}"), "--snip-dir", str(folder / name / "run")]
        probe = [*PROBE, "--snip-probe-microbatches", str(microbatches)]
        args = tiny_llama_args(*MODEL, *loading, *probe, *extra.split(), iters=9)
        check(warm.run(nproc, args, tmp=folder / name))
        found[name] = StatisticsTable.load(folder / name / "run" / "stats" / f"step_{AT}.npz")
    return found


def test_every_column_is_measured(tables: dict[str, StatisticsTable]) -> None:
    table = tables["world-1"]
    assert table.non_finite() == []
    assert table.tokens == table.tokens_per_step == 4 * 128
    assert [row.stage for row in tables["pipeline"].linears] == [0] * 4 + [1] * 4
    for name, array in table.arrays().items():
        if name == "linear.htrace":  # of passes that only hawq asks for
            continue
        # Nothing branches off above the last boundary.
        rows = array[:-1] if name in ("boundary.branch_h2", "boundary.branch_r2") else array
        assert (rows > 0).all(), name


@pytest.mark.parametrize("layout", [name for name in TABLE_LAYOUTS if name != "world-1"])
def test_layouts_measure_the_same(tables: dict[str, StatisticsTable], layout: str) -> None:
    """1e-5, but for the drift of the smallest errors: the difference of two FP32 updates that are almost equal."""
    expected, actual = tables["world-1"], tables[layout]
    assert [(r.name, r.n, r.k) for r in actual.linears] == [(r.name, r.n, r.k) for r in expected.linears]
    assert actual.sinks == expected.sinks
    assert (actual.tokens, actual.tokens_per_step) == (expected.tokens, expected.tokens_per_step)
    rounding = 1e-5 * np.maximum(1.0, 1e-2 / RHO_GRID)
    off = {}
    for name, array in expected.arrays().items():
        limit = rounding if name in ("drift2", "sink_drift2") else 1e-5
        distance = np.abs(actual.arrays()[name] - array) / np.where(array == 0.0, 1.0, array)
        if (distance > limit).any():
            off[name] = float(distance.max())
    assert off == {}
