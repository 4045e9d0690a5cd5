"""Trainings whose linears gather quantised shards have the bits of those that gather bf16, and send fewer bytes.

With ``--snip-communication all`` partial sums are quantised too: other bits, which a recomputation and a resume repeat.
"""

import shlex

import pytest
from checkpoints import differences
from trainings import Run, Trainings, assert_same_training, in_turn
from warm_ranks import WarmRanks

from snip_megatron.numerics.quantize.wire import bytes_per_element
from snip_megatron.precision import Format, Formats
from snip_megatron.runtime.run_data import read_maps

BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4
LAYERS, HIDDEN, TOKENS, MICROBATCHES = 2, 128, 256, 2
MODEL = shlex.split(
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 2 --global-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel --bf16"
)
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
COLUMN = ("self_attention.linear_qkv", "mlp.linear_fc1")
STEPS = 3
MIXED: tuple[Formats, ...] = ((FP8, FP4, FP8), (FP4, FP8, BF16), (BF16, FP4, FP4), (FP4, FP4, FP4))
"""test_layers_parallel.py has other formats."""
FORMATS = in_turn(MIXED, LAYERS)


class Gathers(Trainings):
    """Trainings that communicate in one way or another."""

    def static(self, communication: str, *extra: str) -> Run:
        label = "-".join((communication, *(part.strip("-") for part in extra[:2])))
        chosen = self.map_argument("mixed", FORMATS)
        return self.train(label, *chosen, "--snip-communication", communication, *extra)

    def updated(self, communication: str) -> Run:
        """A map of the run's own from its last step on."""
        update = shlex.split("--snip-first-update 1 --snip-update-interval 1000 --snip-lag 1 --snip-wait 240")
        return self.train(f"updated-{communication}", *update, "--snip-communication", communication)


@pytest.fixture(scope="module")
def trainings(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Gathers:
    return Gathers(warm, tmp_path_factory.mktemp("gathers"), MODEL, STEPS)


def test_bits_are_those_of_bf16_communication(trainings: Gathers) -> None:
    packed = trainings.static("gather")
    assert [step for step, _, _ in packed.figures] == list(range(STEPS))
    assert_same_training(packed, trainings.static("bf16"))


def test_bytes_of_a_step_fall_by_those_of_the_gathers(trainings: Gathers) -> None:
    """Of two ranks each sends its shard: T/2 tokens of X for fprop and again for wgrad, of G for dgrad and wgrad."""
    before, after = trainings.static("bf16").sent, trainings.static("gather").sent
    saved = 0.0
    for linear, (fprop, dgrad, wgrad) in FORMATS.items():
        elements = MICROBATCHES * TOKENS // 2 * HIDDEN
        if linear.path in COLUMN:
            saved += elements * sum(2 - bytes_per_element(fmt) for fmt in (fprop, wgrad))
        elif BF16 not in (dgrad, wgrad):
            saved += elements * max(0.0, 2 - bytes_per_element(dgrad) - bytes_per_element(wgrad))
    assert saved
    for one, other in zip(before, after, strict=True):
        assert one["all_gather"] - other["all_gather"] == saved
        assert one["reduce_scatter"] == other["reduce_scatter"]


def test_updates_measure_and_choose_as_with_bf16(trainings: Gathers) -> None:
    """Statistics are measured in bf16 passes: the same maps."""
    runs = {way: trainings.updated(way) for way in ("bf16", "all")}
    maps = [read_maps(run.folder) for run in runs.values()]
    assert len(maps[0]) == 1
    for of_way in maps[1:]:
        assert [m.choices for m in of_way.values()] == [m.choices for m in maps[0].values()]
    assert runs["all"].sent[0] == runs["bf16"].sent[0]  # in bf16
    assert runs["all"].sent[-1]["all_gather"] < runs["bf16"].sent[-1]["all_gather"]
    assert runs["all"].sent[-1]["reduce_scatter"] < runs["bf16"].sent[-1]["reduce_scatter"]
    assert runs["all"].figures[:2] == runs["bf16"].figures[:2]  # the map is adopted at step 2
    assert runs["all"].figures[-1] != runs["bf16"].figures[-1]


def test_a_run_resumes_with_the_same_bits(trainings: Gathers) -> None:
    """Sums keep nothing from step to step."""
    whole = trainings.static("all")
    chosen = trainings.map_argument("mixed", FORMATS)
    saved = ("--load", str(trainings.saved(whole.folder.name)), "--ckpt-step", "2")
    resumed = trainings.train("resumed-all", *chosen, "--snip-communication", "all", *saved)
    assert resumed.figures == whole.figures[2:]
    assert differences(resumed.checkpoint, whole.checkpoint) == []


# -- quantised partial sums -------------------------------------------------------------------------------------------
def test_sums_of_quantised_parts_are_near_those_of_bf16(trainings: Gathers) -> None:
    """Other numbers from the first forward on, whose loss is that of an untrained model either way."""
    reduced, gathered = trainings.static("all"), trainings.static("gather")
    for (_, one, _), (_, other, _) in zip(reduced.figures, gathered.figures, strict=True):
        assert one != other
        assert one == pytest.approx(other, rel=1e-2)


def test_recomputation_sums_again_with_the_same_bits(trainings: Gathers) -> None:
    again, without = trainings.static("all", *RECOMPUTE), trainings.static("all")
    assert_same_training(again, without)
    assert again.sent[-1]["all_to_all"] > without.sent[-1]["all_to_all"]


def test_bytes_of_a_step_fall_by_those_of_the_sums(trainings: Gathers) -> None:
    """Of two ranks each sends half of its partial Y or ∂L/∂X, where fprop or dgrad is quantised."""
    before, after = trainings.static("gather").sent, trainings.static("all").sent
    sums = [dgrad if linear.path in COLUMN else fprop for linear, (fprop, dgrad, _) in FORMATS.items()]
    elements = MICROBATCHES * TOKENS // 2 * HIDDEN * sum(fmt is not BF16 for fmt in sums)
    for one, other in zip(before, after, strict=True):
        assert one["all_gather"] == other["all_gather"]
        assert one["reduce_scatter"] - other["reduce_scatter"] == 2 * elements
        assert other["all_to_all"] == elements * bytes_per_element(FP8)
