"""``--snip-estimator measured`` through the real entry: exact against options forced alone by a static map, equal on
parallel layouts, rolling over a resume, without a trace."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from agreement import TOUCHED_SHARE
from launch import losses, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.probes import Probes, calls, microbatches_by_kind
from snip_megatron.precision import Gemm
from snip_megatron.records.readers import read_events
from snip_megatron.statistics.measured import MEASURED_COLUMNS, SIGNED
from snip_megatron.statistics.table import StatisticsTable
from snip_megatron.timing.models import ModelShape

# Every shard, gated half, query group and token share is a multiple of 128: tiles fall alike on all layouts.
MODEL = shlex.split(
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 2 --global-batch-size 4 --clip-grad 0"
)
AT = 3  # the step before which options are measured
SEED = 1242  # chooses the fprops of layer 2 and the dgrads of layer 1: either way through a pipeline's border
MEASURE = shlex.split(
    f"--snip --snip-estimator measured --snip-measured-share 0.25 --snip-formats fp4 --snip-first-update {AT}"
    f" --snip-seed {SEED} --snip-update-interval 1000 --snip-lag 500 --snip-probe-tokens 32 --exit-interval {AT + 1}"
)
# Ranks add in another order, so that a value on a boundary of roundings falls to the other side, in about one option in
# ten. In one of the 512 x 256 terms of a GEMM's error the sign changes. Seen: 3.4e-4 of a drift.
FLIPPED, FLIP_LIMIT = ("loss", "first_order", "drift", "raw_drift", "variance"), 1e-2
SHARDED_OPTIMIZER = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
# ranks, microbatches on each data parallel rank (always two in all), arguments
LAYOUTS: dict[str, tuple[int, int, str]] = {
    "world-1": (1, 2, ""),
    "tensor-and-sequence": (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, 2, "--pipeline-model-parallel-size 2"),
    "interleaved-recompute": (
        2,
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "data-per-token-loss": (2, 1, "--calculate-per-token-loss"),
    "data-distributed-optimizer": (2, 1, SHARDED_OPTIMIZER),
}


def check(process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 0, process.stderr[-4000:]


@pytest.fixture(scope="module")
def checkpoint(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and moments after AT steps on one rank; beside it, for the optimizer that does not load the other's."""
    folder = tmp_path_factory.mktemp("measured")
    for name, optimizer in (("warm", ""), ("warm-sharded", SHARDED_OPTIMIZER)):
        saving = ["--save", str(folder / name), "--save-interval", str(AT), "--exit-interval", str(AT)]
        check(warm.run(1, tiny_llama_args(*MODEL, *saving, *optimizer.split(), iters=9), tmp=folder / f"to-{name}"))
    return folder / "warm"


def measured_on(layout: str, warm: WarmRanks, checkpoint: Path, *more: str) -> tuple[StatisticsTable, Path]:
    nproc, microbatches, extra = LAYOUTS[layout]
    folder = checkpoint.parent / "-".join([layout, *more])
    load = checkpoint.with_name("warm-sharded") if SHARDED_OPTIMIZER in extra else checkpoint
    args = ["--load", str(load), "--snip-dir", str(folder / "run"), *MEASURE, *extra.split(), *more]
    check(
        warm.run(
            nproc,
            tiny_llama_args(*MODEL, *args, "--snip-probe-microbatches", str(microbatches), iters=9),
            tmp=folder,
        )
    )
    return StatisticsTable.load(folder / "run" / "stats" / f"step_{AT}.npz"), folder / "run"


@pytest.fixture(scope="module")
def alone(warm: WarmRanks, checkpoint: Path) -> tuple[StatisticsTable, Path]:
    """Measured on one rank, on the step's microbatches and on the next step's."""
    return measured_on("world-1", warm, checkpoint, "--snip-measured-twice")


# -- exact -----------------------------------------------------------------------------------------------------
def options(table: StatisticsTable) -> list[tuple[str, Gemm]]:
    """Some that were measured: the first and the last fprop and dgrad, and a wgrad."""
    assert table.measured is not None
    known = table.measured.known[:, :, 0]
    found = []
    for index, gemm in enumerate(Gemm):
        linears = np.flatnonzero(known[:, index])
        chosen = linears[[1]] if gemm is Gemm.WGRAD else linears[[0, -1]]
        found += [(table.linears[i].name, gemm) for i in chosen]
    return found


@pytest.mark.parametrize(("again", "microbatches"), [(False, [0, 1]), (True, [2, 3])])
def test_measured_is_what_a_run_under_that_option_alone_shows(
    alone: tuple[StatisticsTable, Path], warm: WarmRanks, checkpoint: Path, again: bool, microbatches: list[int]
) -> None:
    """A one-option map, the code that trains, torch's AdamW in float64.

    Microbatches beyond the step's keep their numbers, so stochastic rounding draws other bits in a run that counts from
    0: there only what does not depend on them is compared.
    """
    table, _ = alone
    measured = table.measured_again if again else table.measured
    assert measured is not None
    chosen = [(linear, gemm) for linear, gemm in options(table) if not again or gemm is Gemm.FPROP]
    folder = checkpoint.parent / f"brute-{again}"
    env = {
        "BRUTE": str(folder / "brute.json"),
        "BRUTE_STEP": str(AT),
        "BRUTE_MICROBATCHES": json.dumps(microbatches),
        "BRUTE_OPTIONS": json.dumps([(linear, gemm.value, "fp4") for linear, gemm in chosen]),
    }
    args = ["--load", str(checkpoint), "--snip", "--snip-policy", "bf16", "--snip-seed", str(SEED)]
    args += ["--exit-interval", str(AT + 1)]
    check(warm.run(1, tiny_llama_args(*MODEL, *args, iters=9), module="forced_pretrain", env=env, tmp=folder))
    truth = json.loads((folder / "brute.json").read_text())
    names = [row.name for row in table.linears]
    for (linear, gemm), expected in zip(chosen, truth, strict=True):
        at = (names.index(linear), list(Gemm).index(gemm), 0)
        assert measured["raw_drift"][at] == pytest.approx(expected["drift"], rel=2e-6), (linear, gemm)
        assert measured["loss"][at] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-12)
        if gemm is Gemm.FPROP:
            assert measured["first_order"][at] == pytest.approx(expected["first_order"], rel=1e-6, abs=1e-9)
            assert abs(expected["loss"]) > 1e-6
        else:
            assert measured["loss"][at] == measured["first_order"][at] == 0.0


def test_what_an_update_measures_and_costs(alone: tuple[StatisticsTable, Path]) -> None:
    """A quarter of the eight units (layer, fprop or dgrad): a nudge and four options each; all wgrads at once."""
    table, run = alone
    assert table.measured is not None
    assert table.non_finite() == []
    assert table.measured.known[:, :2].sum() == 2 * 4
    assert table.measured.known[:, 2].all()
    assert set(table.measured["step"][table.measured.known]) == {float(AT)}
    (event,) = [e for e in read_events(run) if e["event"] == "probe" and e["kind"] == "measured"]
    trials, microbatches = 2 * 5 + 1, 2
    assert event["passes"] == 2 * (2 * trials * microbatches + microbatches)  # twice: on two batches
    assert event["seconds"] > 0


def planned_passes(layout: str) -> int:
    """As ``snip plan`` counts them."""
    ranks, microbatches, extra = LAYOUTS[layout]
    sizes = {
        "tp": 2 if "tensor" in extra else 1,
        "pp": 2 if "pipeline" in extra else 1,
        "vpp": 2 if "virtual" in extra else 1,
        "dp": ranks if "model-parallel" not in extra else 1,
    }
    shape = ModelShape("small", 4, 256, 256, 4, 2, 64, vocabulary=255, context=128)
    chosen = Layout(shape, **sizes, seq_length=128, micro_batch_size=2, global_batch_size=4)
    made = calls(chosen, Probes(microbatches, estimator="measured"), ["fp4"])
    return microbatches_by_kind(made)["measured"]


# -- layouts ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.matrix) if name in ("pipeline", "data-per-token-loss") else name
        for name in LAYOUTS
        if name != "world-1"
    ],
)
def test_layouts_measure_the_same(
    alone: tuple[StatisticsTable, Path], warm: WarmRanks, checkpoint: Path, layout: str
) -> None:
    expected, (table, run) = alone[0].measured, measured_on(layout, warm, checkpoint)
    (event,) = [e for e in read_events(run) if e["event"] == "probe" and e["kind"] == "measured"]
    assert event["passes"] == planned_passes(layout)
    assert table.measured is not None
    assert expected is not None
    known = expected.known
    flipped = np.zeros(known.sum(), dtype=bool)
    for name in MEASURED_COLUMNS:
        # Losses of single tokens are float32: their changes are known to 1e-7 of the loss. Float32 has no floor of its
        # own: what is left of one is the order in which gradients are added.
        absolute = {"loss": 1e-7, "first_order": 1e-7, "floor": 1e-5}.get(name, 0.0)
        # Noise of norms and the embedding is estimated from parts: data parallel ranks, or else the first microbatch.
        relative = 2e-2 if name == "variance" and layout.startswith("data") else 2e-5
        value, apart = expected[name][known], np.abs(table.measured[name][known] - expected[name][known])
        beyond = ~(apart <= absolute + relative * np.abs(value))  # also where either is NaN
        if name in FLIPPED:
            flipped |= beyond
            beyond &= ~(apart <= FLIP_LIMIT * np.where(name in SIGNED, np.abs(value).max(), np.abs(value)))
        assert not beyond.any(), (name, value[beyond], apart[beyond])
    gemm = np.nonzero(known)[1]
    for index in range(3):
        assert flipped[gemm == index].mean() <= TOUCHED_SHARE, (index, flipped)
    np.testing.assert_array_equal(table.measured.known, known)


# -- rolling ---------------------------------------------------------------------------------------------------
ROLLING = shlex.split(
    "--snip --snip-estimator measured --snip-measured-share 0.25 --snip-formats fp4 --snip-first-update 2"
    " --snip-update-interval 2 --snip-lag 1 --snip-wait 60 --snip-probe-tokens 32"
)
STEPS, SAVED = 8, 5


def rolling(warm: WarmRanks, folder: Path, *more: str) -> tuple[dict[int, float], dict[int, StatisticsTable]]:
    """(losses by step, tables by step) of a run of eight steps with an update every two."""
    args = [*ROLLING, "--snip-dir", str(folder / "run"), *more]
    process = warm.run(1, tiny_llama_args(*args, iters=STEPS), tmp=folder)
    check(process)
    stats = {int(path.stem.split("_")[1]): path for path in (folder / "run" / "stats").glob("step_*.npz")}
    return losses(process), {step: StatisticsTable.load(path) for step, path in stats.items()}


def test_renewal_rolls_on_over_a_resume_and_a_replay_repeats_its_maps(warm: WarmRanks, tmp_path: Path) -> None:
    saving = ("--save", str(tmp_path / "checkpoint"), "--save-interval", str(SAVED))
    curve, tables = rolling(warm, tmp_path / "whole", *saving)
    ages = [sorted(set(tables[step].measured["step"][:, :2].ravel())) for step in (2, 4, 6)]  # type: ignore[index]
    assert ages == [[-1.0, 2.0], [-1.0, 2.0, 4.0], [-1.0, 2.0, 4.0, 6.0]]

    loading = ("--load", str(tmp_path / "checkpoint"), "--ckpt-step", str(SAVED))
    resumed_curve, resumed = rolling(warm, tmp_path / "resumed", *loading)
    assert resumed.keys() == {4, 6}  # the one on its way, submitted again, and a new one
    for step, table in resumed.items():
        expected = tables[step].arrays()
        assert expected.keys() == table.arrays().keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(table.arrays()[name], array, err_msg=name)
    assert {step: resumed_curve[step] for step in (8,)} == {8: curve[8]}  # the second printed one is a mean of two

    replay = tiny_llama_args("--snip", "--snip-replay", str(tmp_path / "whole" / "run"), iters=STEPS)
    process = warm.run(1, replay, tmp=tmp_path / "replay")
    check(process)
    assert losses(process) == curve
