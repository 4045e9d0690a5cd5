"""Trainings whose data parallel ranks gather quantised weights have the bits of those that gather bf16."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import gathered_parameters as bucket
import pytest
import torch
from checkpoints import differences
from launch import tiny_llama_args
from trainings import Formats, Run, Trainings, assert_same_training, in_turn, map_of
from warm_ranks import WarmRanks

from snip_megatron.precision import Format, LinearId
from snip_megatron.quantization import fake_quantize
from snip_megatron.quantization.ranges import QuantizedWeight
from snip_megatron.records.readers import read_events, read_maps, read_metrics

BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR
LAYERS, STEPS = 2, 4
MODEL = shlex.split(
    f"--num-layers {LAYERS} --hidden-size 128 --ffn-hidden-size 192 --micro-batch-size 1 --global-batch-size 4"
    " --use-distributed-optimizer --bf16 --log-params-norm"
)
TWO_BY_TWO = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
OVERLAP = shlex.split("--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 60000")
VALIDATION = shlex.split("--eval-iters 1 --eval-interval 3 --snip-eval both")
WEIGHTS = {  # of a layer: 4 heads, 2 groups of queries
    "self_attention.linear_qkv": 256 * 128,
    "self_attention.linear_proj": 128 * 128,
    "mlp.linear_fc1": 2 * 192 * 128,
    "mlp.linear_fc2": 192 * 128,
}
OTHERS = 2 * 256 * 128 + 128 + LAYERS * 2 * 128  # embedding, output layer, norms
MAPS: dict[str, tuple[Formats, ...]] = {
    "fp8": ((FP8, FP8, FP8),),
    "fp4": ((FP4, FP4, FP4),),
    "mixed": ((FP8, FP4, FP8), (FP4, FP4, BF16), (BF16, FP4, FP4), (TENSOR, TENSOR, FP8), (Format.NVFP4, FP8, FP8)),
}


# Multiples of 16 bytes. Rank 0 holds 65 elements in bf16 and 20,572 in fp8; rank 1 holds 5,428 in fp8, 231 in fp4,
# 12,000 in both and 2,936 in bf16; rank 2 holds 1,160 in bf16 and 19,350 in fp8_tensor.
HELD = (144 + 20576, 5440 + 128 + (12000 + 6000) + 5872, 2320 + 19360)
PART = 23952  # a third
MOVED = {1: HELD[1] - PART}  # by the rank that has more than a third
TILES = 4 + 1 + 3 + 3 + 1


# -- one gather ------------------------------------------------------------------------------------------------------
def bits(x: torch.Tensor) -> torch.Tensor:
    """As integers; every NaN as one."""
    x = x.float()
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def test_bits_of_a_gather(warm: WarmRanks, tmp_path: Path) -> None:
    """Three ranks, whose parts cut rows, tiles and pairs of elements, with a NaN and an Inf on one rank."""
    env = {"OUT": str(tmp_path)}
    done = warm.run(bucket.RANKS, [], module="gathered_parameters", tmp=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(bucket.RANKS):
        for case, (buffer, weights, sent) in zip(bucket.CASES, torch.load(tmp_path / f"rank{rank}.pt"), strict=True):
            expected, own = bucket.whole(case), range(rank * bucket.LENGTH, (rank + 1) * bucket.LENGTH)
            places = torch.arange(len(expected))
            held = (places >= own.start) & (places < own.stop)
            for parameter in bucket.PARAMETERS:
                w, place = expected[parameter.start : parameter.stop], slice(parameter.start, parameter.stop)
                known = held[place] if parameter.formats else torch.ones_like(held[place])
                assert torch.equal(bits(buffer[place][known]), bits(w[known]))
                assert buffer[place][~known].isnan().all()
                for fmt in parameter.formats:
                    found = QuantizedWeight(*weights[parameter.start][fmt.value]).dequantize()
                    assert torch.equal(bits(found), bits(fake_quantize(w.view(parameter.shape), fmt, block=True)))
            assert sent.pop("all_to_all", 0) == MOVED.get(rank, 0)
            assert sent == {"all_gather": 2 * PART, "all_reduce": 2 * 4 * TILES * 2 // 3}


# -- trainings -------------------------------------------------------------------------------------------------------
def formats_of(name: str, shift: int = 0) -> dict[LinearId, Formats]:
    return in_turn(MAPS[name], LAYERS, shift)


class Gathers(Trainings):
    """Trainings that gather parameters in one way or the other."""

    def static(self, name: str, way: str, *extra: str, ranks: int = 2) -> Run:
        label = "-".join((name, way, str(ranks), *(part.strip("-") for part in extra[:2])))
        chosen = self.map_argument(name, formats_of(name))
        return self.train(label, *chosen, "--snip-parameter-gather", way, *extra, ranks=ranks)

    def schedule(self) -> tuple[str, str]:
        """A run to replay, which adopts another map before each of some steps."""
        folder = self.folder / "schedule"
        (folder / "maps").mkdir(parents=True, exist_ok=True)
        maps = {0: formats_of("fp8"), **{step: formats_of("mixed", shift) for step, shift in ((2, 0), (3, 2), (5, 4))}}
        for step, chosen in maps.items():
            (folder / "maps" / f"step_{step}.json").write_text(map_of(chosen).to_json())
        events = [{"time": 0.0, "step": step, "event": "adopt"} for step in maps]
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return "--snip-replay", str(folder)


@pytest.fixture(scope="module")
def trainings(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Gathers:
    return Gathers(warm, tmp_path_factory.mktemp("gathers"), MODEL, STEPS)


@pytest.mark.parametrize("name", ["fp8", "mixed", pytest.param("fp4", marks=pytest.mark.matrix)])
def test_bits_and_bytes(trainings: Gathers, name: str) -> None:
    """Each of two ranks sends its half of the parameters, as far as halves of the model are alike."""
    plain, quantised = trainings.static(name, "bf16"), trainings.static(name, "quantized")
    assert_same_training(quantised, plain)
    total, tiles = 2 * OTHERS, 0
    for linear, formats in formats_of(name).items():
        of_each = {FP8: 1.0, TENSOR: 1.0, FP4: 0.5}
        total += int(WEIGHTS[linear.kind] * min(2.0, sum(of_each.get(fmt, 2.0) for fmt in set(formats[:2]))))
        tiles += 2 * -(-WEIGHTS[linear.kind] // 8192)  # at most
    for one, other in zip(plain.sent, quantised.sent, strict=True):
        assert one["all_gather"] == pytest.approx(OTHERS + sum(WEIGHTS.values()) * LAYERS, rel=2e-3)
        if name == "mixed":  # one half holds more of what is gathered in bf16
            assert total / 2 < other["all_gather"] < 0.8 * one["all_gather"]
        else:
            assert other["all_gather"] == pytest.approx(total / 2, rel=2e-3)
        assert 0 < other["all_reduce"] - one["all_reduce"] <= 4 * tiles
        assert other["reduce_scatter"] == one["reduce_scatter"]


def test_bits_of_a_gather_in_the_forward(trainings: Gathers) -> None:
    plain, quantised = (trainings.static("mixed", way, *OVERLAP) for way in ("bf16", "quantized"))
    assert_same_training(quantised, plain)
    # One half of a small bucket holds most of what is gathered in bf16, and both send as much.
    assert quantised.sent[-1]["all_gather"] < plain.sent[-1]["all_gather"]


def test_bits_on_two_tensor_parallel_ranks(trainings: Gathers) -> None:
    """Whose weights with one scale for the tensor have the amax of both shards."""
    plain, quantised = (trainings.static("mixed", way, *TWO_BY_TWO, ranks=4) for way in ("bf16", "quantized"))
    assert_same_training(quantised, plain)
    assert quantised.sent[-1]["all_gather"] < plain.sent[-1]["all_gather"]


@pytest.mark.parametrize("extra", [(), OVERLAP], ids=["after", "overlapped"])
def test_what_reads_bf16_weights(trainings: Gathers, extra: tuple[str, ...]) -> None:
    """Probes, maps that change, validations in both ways and checkpoints, between steps under quantised gathers."""
    update = shlex.split("--snip-first-update 1 --snip-update-interval 4 --snip-lag 2 --snip-wait 240")
    ways = {}
    for way in ("bf16", "quantized"):
        name = f"updated-{way}-{len(extra)}"
        ways[way] = trainings.train(name, *update, *VALIDATION, *extra, "--snip-parameter-gather", way, steps=10)
    plain, quantised = ways["bf16"], ways["quantized"]
    assert_same_training(quantised, plain)
    maps = [list(read_maps(run.folder).values()) for run in (plain, quantised)]
    assert len(maps[0]) == 2
    assert [m.choices for m in maps[0]] == [m.choices for m in maps[1]]
    validations = [
        [(e["step"], e["formats"], e["loss"]) for e in read_events(run.folder) if e["event"] == "validation"]
        for run in (plain, quantised)
    ]
    assert {formats for _, formats, _ in validations[0]} == {"map", "bf16"}
    assert validations[0] == validations[1]
    less = [
        one.get("all_gather", 0) > other.get("all_gather", 0)
        for one, other in zip(plain.sent, quantised.sent, strict=True)
    ]
    assert not any(less[:3])
    assert any(less[3:])


@pytest.mark.parametrize("extra", [(), OVERLAP], ids=["after", "overlapped"])
def test_maps_that_change_between_two_gathers(trainings: Gathers, extra: tuple[str, ...]) -> None:
    """A weight that was gathered quantised is read in bf16 or other formats next, and the other way around."""
    runs = []
    for way in ("bf16", "quantized"):
        own = (*trainings.schedule(), "--save-interval", "100", *extra, "--snip-parameter-gather", way)
        runs.append(trainings.train(f"replayed-{way}-{len(extra)}", *own, steps=7))
    assert_same_training(*runs)
    changes = [event["step"] for event in read_events(runs[1].folder) if event["event"] == "adopt"]
    assert changes == [0, 2, 3, 5]


def test_a_run_resumes_with_the_same_bits(trainings: Gathers) -> None:
    """A checkpoint does not know how parameters were gathered."""
    whole = trainings.static("mixed", "quantized")
    chosen = trainings.map_argument("mixed", formats_of("mixed"))
    saved = ("--load", str(trainings.saved(whole.folder.name)), "--ckpt-step", "2")
    for way in ("bf16", "quantized"):
        resumed = trainings.train(f"resumed-{way}", *chosen, "--snip-parameter-gather", way, *saved)
        assert resumed.figures == whole.figures[2:]
        assert differences(resumed.checkpoint, whole.checkpoint) == []


def test_a_nan_of_one_rank_reaches_all(warm: WarmRanks, tmp_path: Path) -> None:
    """As with bf16: the loss of the next step is NaN, and training goes on as Megatron was told."""
    losses = []
    for way in ("bf16", "quantized"):
        run = tmp_path / way
        own = ("--snip", "--snip-policy", "uniform-fp8", "--snip-dir", str(run), "--snip-parameter-gather", way)
        args = tiny_llama_args(*MODEL, *own, "--no-check-for-nan-in-loss-and-grad", iters=3)
        done = warm.run(2, args, module="nan_weight_pretrain", tmp=tmp_path / f"{way}-ranks", timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append([row["loss"] for row in read_metrics(run)])
    assert losses[0] == losses[1]
    assert [loss is None for loss in losses[0]] == [False, False, True]
