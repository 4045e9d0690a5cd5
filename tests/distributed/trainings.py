"""Short trainings under SNIP, each made once, and their comparison bit by bit."""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import differences, read_checkpoint
from launch import tiny_llama_args
from layouts import figures
from warm_ranks import WarmRanks

from snip_megatron.precision import DENSE_LAYER, Formats, Gemm, LinearId, PrecisionMap, option_id


@dataclass(frozen=True)
class Run:
    """What a training left behind."""

    figures: list[tuple[int, float, float]]
    checkpoint: dict[str, Any]
    sent: list[dict[str, int]]
    folder: Path


class Trainings:
    """Trainings in ``folder`` with ``common`` arguments and so many ``steps``. Every second step is saved."""

    def __init__(self, warm: WarmRanks, folder: Path, common: Sequence[str], steps: int) -> None:
        self.folder = folder
        self._warm, self._common, self._steps = warm, common, steps
        self.train = functools.cache(self._train)

    def _train(self, name: str, *extra: str, ranks: int = 2, steps: int | None = None) -> Run:
        run, saved, iters = self.folder / name, self.saved(name), steps or self._steps
        own = ("--snip", "--snip-dir", str(run), "--save", str(saved), "--save-interval", "2")
        args = tiny_llama_args(*self._common, *own, *extra, iters=iters)
        sent = self.folder / f"{name}-sent.json"
        self._warm.succeed(
            ranks,
            args,
            module="counted_pretrain",
            env={"SENT": str(sent)},
            tmp=self.folder / f"{name}-ranks",
            timeout=300,
        )
        return Run(figures(run), read_checkpoint(saved, iters), json.loads(sent.read_text()), run)

    def saved(self, name: str) -> Path:
        """The folder of a training's checkpoints."""
        return self.folder / f"{name}-saved"

    def map_argument(self, name: str, formats: Mapping[LinearId, Formats]) -> tuple[str, str]:
        """Write a map that all steps use."""
        path = self.folder / f"{name}.json"
        path.write_text(map_of(formats).to_json())
        return "--snip-map", str(path)


def in_turn(listed: Sequence[Formats], layers: int, shift: int = 0) -> dict[LinearId, Formats]:
    """The formats of each linear: those listed, in turn, from the one at ``shift`` on."""
    linears = [LinearId("decoder", layer, kind) for layer in range(layers) for kind in DENSE_LAYER]
    return dict(zip(linears, itertools.islice(itertools.cycle(listed), shift, None), strict=False))


def map_of(formats: Mapping[LinearId, Formats]) -> PrecisionMap:
    choices = {
        option_id(str(linear), gemm): fmt
        for linear, of_linear in formats.items()
        for gemm, fmt in zip(Gemm, of_linear, strict=True)
    }
    return PrecisionMap(choices, version=1)


def assert_same_training(one: Run, other: Run) -> None:
    assert one.figures == other.figures
    assert differences(one.checkpoint, other.checkpoint) == []
