"""One training under SNIP on many parallel layouts, from one checkpoint, held against one rank.

Every layout loads the weights and moments that one rank saved, measures before its first step, solves, adopts the map
and trains on under it. What must agree: the table of statistics, the map, the losses. Every shard, gated half, query
group and token share is a multiple of 128, so that tiles fall alike (docs/how-it-works.md, rules of a run).
"""

import functools
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from agreement import agree, worst_differences
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.precision import PrecisionMap
from snip_megatron.runtime.run_data import read_events, read_maps, read_metrics
from snip_megatron.sensitivity.table import StatisticsTable

MODEL = shlex.split(
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 2 --global-batch-size 4 --lr 1e-4 --min-lr 1e-5"
)
AT = 3
"""Steps in the checkpoint; the probe runs before the next one."""
# Pipeline stages have budgets of their own: without a stage constraint all layouts are asked the same.
SNIP = shlex.split(
    "--snip --snip-estimator noise --snip-update-interval 1000 --snip-wait 240 --snip-stage-tolerance none"
    " --snip-settings probe_tokens=96"
)
SHARDED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_INSTANCES = "--num-distributed-optimizer-instances 2"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"

LOSS_LIMIT, RAGGED_LIMIT = 1e-3, 0.1
_RAGGED = ("dx_col2", "dg_col2", "wdrift2")


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        base: the layout on one rank.
        arguments: Megatron's, beside the common ones. snip: ours, likewise.
        probed: microbatches of the probe, over all data parallel ranks.
        at: the step before which it runs.
        tied: the output layer has the word embedding's weight.
        ragged: experts' tokens are no multiple of 128: their tiles along tokens fall otherwise where ranks share
            experts (docs/how-it-works.md, rules of a run), and RAGGED_LIMIT holds for what is measured by these tiles.
    """

    base: str
    arguments: str = ""
    snip: str = ""
    probed: int = 2
    at: int = AT
    tied: bool = False
    ragged: bool = False


_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1,1,0] --moe-ffn-hidden-size 256"
    " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
    " --moe-token-dispatcher-type alltoall --global-batch-size 8 --adam-eps 1e-4"
)
# Megatron keeps experts' optimizer apart where they are parallel, and does not load one kind into the other: weights
# alone come from the checkpoint, the moments from a step after it whose learning rate is 0: weights are still the same.
_EXPERTS += " --no-load-optim --no-load-rng"
MODELS: dict[str, Model] = {
    "dense": Model("world-1"),
    "tied": Model("tied-world-1", tied=True),
    # Two layers of four are mixtures of experts. Experts pad to 128 tokens a microbatch, so that tiles fall alike, and
    # noise passes compare all of them.
    "experts": Model(
        "experts-world-1",
        f"{_EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
        "--snip-settings probe_tokens=4096",
        probed=4,
        at=AT + 1,
    ),
    # Without a capacity, an expert gets any number of tokens, or none.
    "experts-dropless": Model(
        "experts-dropless-world-1", _EXPERTS, "--snip-settings probe_tokens=4096", probed=4, at=AT + 1, ragged=True
    ),
    # The same with a shared expert. Local layers do not group GEMMs, whatever is asked.
    "experts-shared": Model(
        "experts-shared-world-1",
        f"{_EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 256 --moe-router-enable-expert-bias"
        " --moe-router-score-function sigmoid",
        "--snip-budget fp4=0.4 --snip-settings probe_tokens=4096",
        probed=4,
        at=AT + 1,
        ragged=True,
    ),
}


@dataclass(frozen=True)
class Layout:
    """One row of the matrix.

    Attributes:
        ranks: all of them. arguments: Megatron's. data: data parallel size.
        bitwise: the layout that this one must equal bit for bit; None: one rank, within the limits.
        model: of MODELS.
    """

    ranks: int
    arguments: str = ""
    data: int = 1
    bitwise: str | None = None
    model: str = "dense"

    @property
    def sharded(self) -> bool:
        return SHARDED in self.arguments


LAYOUTS: dict[str, Layout] = {
    "world-1": Layout(1),
    "tp2": Layout(2, "--tensor-model-parallel-size 2"),
    "tp2-sp": Layout(2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": Layout(2, "--pipeline-model-parallel-size 2"),
    "pp2-virtual": Layout(2, _VIRTUAL),
    "pp3-embedding-and-loss-alone": Layout(
        3, "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout E|tttt|L"
    ),
    "dp2": Layout(2, data=2),
    "dp2-overlap": Layout(2, "--overlap-grad-reduce", data=2),
    "dp2-per-token-loss": Layout(2, "--calculate-per-token-loss", data=2),
    "dp2-distributed-optimizer": Layout(2, SHARDED, data=2),
    "dp2-distributed-optimizer-overlap": Layout(2, f"{SHARDED} {OVERLAP}", data=2),
    "dp2-two-distributed-optimizers": Layout(2, f"{SHARDED} {OVERLAP} {_INSTANCES}", data=2),
    "tp2-pp2-dp2": Layout(
        8,
        f"--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 {SHARDED} {OVERLAP}",
        data=2,
    ),
    "tied-world-1": Layout(1, model="tied"),
    "tied-pp2": Layout(2, "--pipeline-model-parallel-size 2", model="tied"),
    "recompute-full": Layout(1, FULL_RECOMPUTE, bitwise="world-1"),
    "recompute-selective": Layout(1, "--recompute-granularity selective", bitwise="world-1"),
    "tp2-sp-recompute-full": Layout(
        2, f"--tensor-model-parallel-size 2 --sequence-parallel {FULL_RECOMPUTE}", bitwise="tp2-sp"
    ),
    "tp2-sp-recompute-selective": Layout(
        2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective", bitwise="tp2-sp"
    ),
    "pp2-virtual-recompute-full": Layout(2, f"{_VIRTUAL} {FULL_RECOMPUTE}", bitwise="pp2-virtual"),
    "dp2-distributed-optimizer-recompute-full": Layout(
        2, f"{SHARDED} {FULL_RECOMPUTE}", data=2, bitwise="dp2-distributed-optimizer"
    ),
}
_EP2 = "--expert-model-parallel-size 2"
for _model in ("experts", "experts-dropless", "experts-shared"):
    LAYOUTS |= {
        f"{_model}-{name}": replace(layout, model=_model)
        # Megatron counts capacity in a rank's tokens, so that sequence parallelism drops other tokens.
        for name, layout in {
            "world-1": Layout(1),
            "dp2": Layout(2, data=2),
            "ep2": Layout(2, _EP2, data=2),
            "ep2-distributed-optimizer-overlap": Layout(2, f"{_EP2} {SHARDED} {OVERLAP}", data=2),
            "ep2-dp2": Layout(4, _EP2, data=4),
            "ep2-dp2-two-distributed-optimizers": Layout(4, f"{_EP2} {SHARDED} {_INSTANCES}", data=4),
            "pp2": Layout(2, "--pipeline-model-parallel-size 2"),
            "tp2-sp": Layout(2, "--tensor-model-parallel-size 2 --sequence-parallel"),
            "tp2-sp-ep2": Layout(
                2, f"--tensor-model-parallel-size 2 --sequence-parallel {_EP2} --expert-tensor-parallel-size 1"
            ),
            "recompute-full": Layout(1, FULL_RECOMPUTE, bitwise=f"{_model}-world-1"),
        }.items()
        if _model != "experts" or not name.startswith("tp2")
    }
FAST = (
    "tp2-sp", "pp2-virtual", "dp2-distributed-optimizer-overlap", "dp2-two-distributed-optimizers", "tied-pp2",
    "recompute-full", "experts-ep2",
)  # fmt: skip
"""What the suite runs of it."""


@dataclass(frozen=True)
class Trained:
    """The statistics, the map, the adoptions and the figures of one run."""

    table: StatisticsTable
    precision_map: PrecisionMap
    adopted: list[tuple[int, int]]
    figures: list[tuple[int, float, float]]


class LayoutRuns:
    """Runs from one checkpoint, each made once.

    Args:
        warm: the ranks. folder: where runs and checkpoints go.
        steps: trained after the checkpoint. lag: steps from the probe to the map.
    """

    def __init__(self, warm: WarmRanks, folder: Path, steps: int, lag: int) -> None:
        self._warm, self._folder, self._steps = warm, folder, steps
        self._lag = ["--snip-lag", str(lag)]
        self.trained = functools.cache(self._trained)
        self.checkpoint = functools.cache(self._checkpoint)

    def _train(self, ranks: int, name: str, model: str, *arguments: str, steps: int) -> None:
        of_model = MODELS[model].arguments.split()
        args = tiny_llama_args(*MODEL, *of_model, *arguments, "--exit-interval", str(steps), iters=AT + 40)
        if MODELS[model].tied:
            args.remove("--untie-embeddings-and-output-weights")
        self._warm.succeed(ranks, args, tmp=self._folder / name, timeout=1200)

    def _checkpoint(self, sharded: bool, model: str = "dense") -> Path:
        """One rank's, by optimizer: Megatron does not load one kind into the other."""
        path = self._folder / f"saved-{model}{'-sharded' if sharded else ''}"
        # Unclipped: each optimizer adds up the norm in an order of its own, and the two would be a last bit apart.
        saving = ["--save", str(path), "--save-interval", str(AT), "--clip-grad", "0"]
        self._train(1, f"to-{path.name}", model, *saving, *(SHARDED.split() if sharded else []), steps=AT)
        return path

    def _trained(self, name: str) -> Trained:
        layout = LAYOUTS[name]
        model = MODELS[layout.model]
        probe = ["--snip-probe-microbatches", str(model.probed // layout.data), "--snip-first-update", str(model.at)]
        probe += model.snip.split()
        run = self._folder / name / "run"
        place = ("--load", str(self.checkpoint(layout.sharded, layout.model)), "--snip-dir", str(run))
        snip = (*SNIP, *self._lag, *probe, *layout.arguments.split())
        self._train(layout.ranks, name, layout.model, *place, *snip, steps=model.at + self._steps)
        (precision_map,) = read_maps(run).values()
        return Trained(
            table=StatisticsTable.load(run / "stats" / f"step_{model.at}.npz"),
            precision_map=precision_map,
            adopted=[(e["step"], e["changed"]) for e in events(run, "adopt")],
            figures=figures(run),
        )

    def check(self, name: str) -> None:
        """Compare a layout with the one that it must equal: bit for bit, or statistics and losses within the limits."""
        layout = LAYOUTS[name]
        model = MODELS[layout.model]
        expected, actual = self.trained(layout.bitwise or model.base), self.trained(name)
        statistics = worst_differences(expected.table, actual.table, ragged=_RAGGED if model.ragged else ())
        assert agree(statistics), statistics
        assert statistics["ragged"] <= RAGGED_LIMIT
        assert actual.precision_map.choices == expected.precision_map.choices
        assert actual.adopted == expected.adopted
        assert actual.adopted[0][1] > 0  # a map that changes formats
        assert [step for step, _, _ in actual.figures] == [step for step, _, _ in expected.figures]
        assert sum(step >= model.at for step, _, _ in actual.figures) == self._steps
        for (step, loss, _), (_, result, _) in zip(expected.figures, actual.figures, strict=True):
            assert abs(result - loss) <= LOSS_LIMIT * loss, step
        if layout.bitwise is not None:
            assert actual.figures == expected.figures
            for column, array in expected.table.arrays.items():
                np.testing.assert_array_equal(actual.table.arrays[column], array, err_msg=column)


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of these kinds."""
    return [event for event in read_events(run) if event["event"] in kinds]


def figures(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step of a run directory."""
    return [(m["step"], m["loss"], m["grad_norm"]) for m in read_metrics(run)]
