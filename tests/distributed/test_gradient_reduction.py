"""Gradients that data parallel ranks sum in FP8: the bits of a readable sum, on every way through a training."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from altered_pretrain import SUMMED
from checkpoints import differences, read_checkpoint
from launch import tiny_llama_args
from layouts import figures
from warm_ranks import WarmRanks

from snip_megatron.numerics.quantize import fake_quantize

MODEL = shlex.split("--num-layers 2 --micro-batch-size 1 --global-batch-size 4 --use-distributed-optimizer --bf16")
POLICY = ("--snip-policy", "uniform-fp8")
STEPS = 4


def test_bits_of_a_sum(warm: WarmRanks, tmp_path: Path) -> None:
    """Each of three ranks adds its own part as it is, and those of the others as E4M3 numbers, in the ranks' order."""
    warm.succeed(3, [], module="altered_pretrain:summed", tmp=tmp_path, env={"OUT": str(tmp_path)})
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(3)]
    for place, (length, dtype) in enumerate(SUMMED):
        for rank in range(3):
            parts = [result[place][0].view(3, length)[rank] for result in ranks]
            terms = [fake_quantize(part.view(1, -1), "fp8")[0] for part in parts]
            terms[rank] = parts[rank].float()
            result, total = ranks[rank][place][1], (terms[0] + terms[1] + terms[2]).to(dtype)
            torch.testing.assert_close(result, total, rtol=0, atol=0, equal_nan=True)
            finite = result.isfinite()
            assert finite.sum() == (256 if (length, rank) == (384, 0) else length)
            exact = torch.stack(parts).double().sum(0)
            assert float((result - exact)[finite].norm() / exact[finite].norm()) < 0.05


@dataclass(frozen=True)
class Run:
    """Figures and last checkpoint of a training on two ranks. Every second step is saved."""

    figures: list[tuple[int, float, float]]
    checkpoint: dict[str, Any]


def train(warm: WarmRanks, folder: Path, name: str, *extra: str) -> Run:
    run, saved = folder / name, folder / f"{name}-saved"
    where = ("--snip", *POLICY, "--snip-dir", str(run), "--save", str(saved), "--save-interval", "2")
    args = tiny_llama_args(*MODEL, *where, *extra, iters=STEPS)
    warm.succeed(2, args, tmp=folder / f"{name}-ranks", timeout=300)
    return Run(figures(run), read_checkpoint(saved, STEPS))


def test_trainings(warm: WarmRanks, tmp_path: Path) -> None:
    """FP8 sums give other numbers than FP32 sums, and the same numbers after a resume that overlaps them."""
    quantised = ("--snip-gradient-reduction", "fp8")
    plain, reduced = train(warm, tmp_path, "fp32"), train(warm, tmp_path, "fp8", *quantised)
    for (_, loss, norm), (_, reduced_loss, reduced_norm) in zip(plain.figures, reduced.figures, strict=True):
        assert norm != reduced_norm
        assert reduced_norm == pytest.approx(norm, rel=0.02)
        assert reduced_loss == pytest.approx(loss, rel=1e-2)
    assert plain.figures[0][1] == reduced.figures[0][1]  # the loss before the first update of the weights

    resume = ("--load", str(tmp_path / "fp8-saved"), "--ckpt-step", "2", "--overlap-grad-reduce")
    resumed = train(warm, tmp_path, "resumed", *quantised, *resume)
    assert resumed.figures == reduced.figures[2:]
    assert differences(resumed.checkpoint, reduced.checkpoint) == []


def test_tensor_parallel_ranks_have_one_gradient_of_what_they_all_hold(warm: WarmRanks, tmp_path: Path) -> None:
    """Under sequence parallelism, where they sum what data parallel ranks have summed. Otherwise it is refused: a tile
    that a norm shares with a sharded weight has another scale on each rank.
    """
    args = tiny_llama_args(
        *shlex.split("--num-layers 1 --micro-batch-size 1 --global-batch-size 2 --use-distributed-optimizer --bf16"),
        *shlex.split("--tensor-model-parallel-size 2 --sequence-parallel --snip-gradient-reduction fp8"),
        *("--snip", *POLICY, "--snip-dir", str(tmp_path / "run")), iters=3,
    )  # fmt: skip
    env = {"REPLICAS": str(tmp_path)}
    warm.succeed(4, args, module="altered_pretrain", tmp=tmp_path / "ranks", env=env, timeout=300)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(4)]
    assert len(ranks[0]) == 3
    for first in (0, 2):  # of data parallel ranks 0 and 1
        for name, gradient in ranks[first].items():
            assert gradient.any()
            assert torch.equal(gradient, ranks[first + 1][name])
