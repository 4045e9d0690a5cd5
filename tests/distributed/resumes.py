"""One training under SNIP, interrupted after any step and resumed from Megatron's distributed checkpoint.

On the same layout the rest must be the uninterrupted run bit for bit: figures, decisions, the last checkpoint. On
another layout: the same decisions at the same steps, and the same map from the first update. Once steps were trained in
fp4 on another layout, values on a boundary of roundings have fallen elsewhere and options of nearly equal score may
change places: later maps may cost ``EXCESS_LIMIT`` more than the uninterrupted run's own, by that run's scores.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import SNIP_KEY, differences, read_checkpoint
from launch import losses, tiny_llama_args
from layouts import MODEL, SHARDED, events, figures
from warm_ranks import WarmRanks

from snip_megatron.precision import PrecisionMap
from snip_megatron.runtime.run_data import read_events, read_maps
from snip_megatron.solver.problem import Problem

EXCESS_LIMIT = 0.01
_DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --num-layers 2 --moe-layer-freq [0,1]"
    " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16"
    " --v-head-dim 16 --rope-type rope --mtp-num-layers 1"
)
"""For TRACE of altered_pretrain, which has torch's attention for it."""
_TWO_LAYERS = "--num-layers 2"
_NOISE = (
    "--snip --snip-first-update 3 --snip-update-interval 5 --snip-lag 3 --snip-wait 240 --snip-settings probe_tokens=32"
)
# Steps 16 to 18 spike: the guard takes the map of 14 back before 20. The second update starts before 52.
_EVERYTHING = (
    "--snip --snip-formats fp4 --snip-first-update 10"
    " --snip-update-interval 42 --snip-lag 4 --snip-wait 240 --snip-settings probe_tokens=32 --snip-guard-steps 6"
)


@dataclass(frozen=True)
class Interrupted:
    """A run to interrupt.

    Attributes:
        ranks: all of them. arguments: Megatron's and SNIP's. steps: its length. every: steps between checkpoints.
        fast: checkpoints from which the suite resumes; the whole matrix resumes from all.
        module, env: entry and its variables.
    """

    ranks: int
    arguments: str
    steps: int
    every: int = 1
    fast: tuple[int, ...] = ()
    module: str = "snip_megatron.pretrain_gpt"
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def points(self) -> tuple[int, ...]:
        return tuple(range(self.every, self.steps, self.every))


# Updates begin before steps 3, 8 and 13 and are adopted before 6, 11 and 16. Two layers where nothing needs more.
SAME_LAYOUT: dict[str, Interrupted] = {
    "world-1": Interrupted(1, f"{_NOISE} {_DROPOUT} {_TWO_LAYERS}", 18),
    "tp2-sp-bf16": Interrupted(
        2, f"{_NOISE} {_DROPOUT} {_TWO_LAYERS} --tensor-model-parallel-size 2 --sequence-parallel --bf16", 18
    ),
    "pp2-virtual": Interrupted(
        2, f"{_NOISE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 12
    ),
    "dp2-distributed-optimizer-async-save": Interrupted(
        2,
        f"{_NOISE} {_DROPOUT} {_TWO_LAYERS} --use-distributed-optimizer --overlap-grad-reduce --async-save",
        12,
        every=2,
        fast=(4,),
    ),
    "dp2-bf16-gradients": Interrupted(
        2,
        f"{_NOISE} {_DROPOUT} {_TWO_LAYERS} --bf16 --grad-reduce-in-bf16 --use-distributed-optimizer"
        " --overlap-grad-reduce --global-batch-size 8",
        9,
        every=4,
        fast=(4,),
    ),
    "dp2-fp16": Interrupted(2, f"{_NOISE} {_DROPOUT} {_TWO_LAYERS} --fp16 --initial-loss-scale 65536", 9, every=4),
    "expert-parallel": Interrupted(
        2,
        f"{_NOISE} {_DROPOUT} {EXPERTS} --expert-model-parallel-size 2 --moe-input-jitter-eps 0.05"
        " --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
        9,
        every=4,
        fast=(4,),
    ),
    "everything": Interrupted(
        2,
        f"{_EVERYTHING} {_TWO_LAYERS} {SHARDED}",
        58,
        every=17,
        fast=(51,),
        module="altered_pretrain",
        env={"SPIKES": "16,19"},
    ),
}
"""A guard that takes a map back and an update that drift starts: ``everything``."""

# Stage budgets differ between layouts; without them all ask the same. A probe takes microbatches on each data parallel
# rank: one rank takes as many as two do together.
_RESHARDED = f"{_NOISE} --snip-stage-tolerance none {_TWO_LAYERS} --lr 1e-4 --min-lr 1e-5"
PLACES: dict[str, tuple[int, str]] = {
    "world-1": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "world-1-sharded": (1, f"{SHARDED} --snip-probe-microbatches 2"),
    "dp2-sharded": (2, SHARDED),
    "tp2-pp2-dp2-sharded": (
        8, f"--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 {SHARDED}"
    ),
}  # fmt: skip
OTHER_LAYOUT: tuple[tuple[str, str], ...] = (
    ("tp2", "pp2"),
    ("pp2", "tp2-sp"),
    ("dp2-sharded", "world-1-sharded"),
    ("world-1-sharded", "dp2-sharded"),
    ("world-1-sharded", "tp2-pp2-dp2-sharded"),
    ("tp2-pp2-dp2-sharded", "world-1-sharded"),
)
FAST_OTHER: tuple[tuple[str, str, int], ...] = (("tp2", "pp2", 4),)
"""What the suite runs of it; test_phases_in_training.py moves a sharded optimizer."""
RESHARDED_STEPS, RESHARDED_POINTS = 13, (2, 4, 8, 10)
"""Saved before an update, between submit and adopt, after an adoption, and between again."""


class ResumeRuns:
    """Whole runs, each made once, and what resuming them gives."""

    def __init__(self, warm: WarmRanks, folder: Path) -> None:
        self._warm, self._folder = warm, folder
        self.whole = functools.cache(self._whole)
        self.placed = functools.cache(self._placed)

    def _train(self, name: str, case: Interrupted, *extra: str) -> Path:
        """The run directory."""
        run = self._folder / name / "run"
        args = tiny_llama_args(*case.arguments.split(), "--snip-dir", str(run), *extra, iters=case.steps)
        self._warm.succeed(case.ranks, args, module=case.module, env=case.env, tmp=run.parent, timeout=1200)
        return run

    def _whole(self, name: str) -> Path:
        case, saved = SAME_LAYOUT[name], self._folder / name / "checkpoint"
        return self._train(name, case, "--save", str(saved), "--save-interval", str(case.every))

    def resume(self, name: str, point: int) -> None:
        """Go on with the run ``name`` from its checkpoint after ``point`` steps as if it had not stopped."""
        case, whole = SAME_LAYOUT[name], self.whole(name)
        saved, again = self._folder / name / "checkpoint", self._folder / f"{name}-{point}" / "checkpoint"
        loading = ("--load", str(saved), "--ckpt-step", str(point))
        run = self._train(f"{name}-{point}", case, *loading, "--save", str(again), "--save-interval", str(case.steps))
        assert figures(run) == [figure for figure in figures(whole) if figure[0] >= point]
        assert _later_decisions(run, whole, point) == _later_decisions(whole, whole, point)
        assert _choices(run, point) == _choices(whole, point)
        states = [read_checkpoint(folder, case.steps) for folder in (saved, again)]
        assert differences(*states) == []
        assert all(any(name.startswith(SNIP_KEY + "state") for name in end) for end in states)

    # -- another layout ----------------------------------------------------------------------------------------
    def _placed(self, place: str) -> Path:
        saved = self._folder / f"from-{place}" / "checkpoint"
        return self._train(f"from-{place}", _resharded(place), "--save", str(saved), "--save-interval", "2")

    def move(self, source: str, target: str, point: int) -> str:
        """Resume a run on ``source`` on ``target`` after ``point`` steps. Returns what the checkpoint holds."""
        whole = self.placed(source)
        loading = ("--load", str(whole.parent / "checkpoint"), "--ckpt-step", str(point))
        run = self._train(f"{source}-{point}-{target}", _resharded(target), *loading)
        assert [step for step, _, _ in figures(run)] == [step for step, _, _ in figures(whole) if step >= point]
        apart = ("changed",)
        assert _later_decisions(run, whole, point, apart) == _later_decisions(whole, whole, point, apart)
        maps, expected = _choices(run, point), _choices(whole, point)
        assert list(maps) == list(expected)
        assert list(maps.values())[:1] == list(expected.values())[:1]
        for step, choices in maps.items():
            assert choices == expected[step] or excess(whole, step, choices) <= EXCESS_LIMIT
        return state_at(whole, point)

    # -- with and without SNIP ---------------------------------------------------------------------------------
    def leave_snip(self, name: str, point: int) -> None:
        """Load a checkpoint of SNIP into our entry without ``--snip``, and into Megatron's own ``pretrain``."""
        case = SAME_LAYOUT[name]
        self.whole(name)
        options = case.arguments.removeprefix(_NOISE).split()
        loading = ("--load", str(self._folder / name / "checkpoint"), "--ckpt-step", str(point))
        curves = []
        for module in ("snip_megatron.pretrain_gpt", "altered_pretrain:plain"):
            tmp = self._folder / f"{name}-{module.rpartition(':')[2]}"
            args = tiny_llama_args(*options, *loading, iters=case.steps)
            curves.append(losses(self._warm.succeed(case.ranks, args, module=module, tmp=tmp, timeout=600)))
        assert set(curves[0]) == set(range(point + 1, case.steps + 1))
        assert curves[0] == curves[1]

    def enter_snip(self, name: str) -> None:
        """Load a checkpoint without SNIP's state under SNIP, which says so once and trains in bf16 until its update."""
        case = SAME_LAYOUT[name]
        options, saved = case.arguments.removeprefix(_NOISE).split(), self._folder / f"{name}-plain" / "checkpoint"
        saving = ("--save", str(saved), "--save-interval", "2", "--exit-interval", "2")
        args = tiny_llama_args(*options, *saving, iters=case.steps)
        self._warm.succeed(case.ranks, args, module="altered_pretrain:plain", tmp=saved.parent, timeout=600)
        run = self._folder / f"{name}-entered" / "run"
        loading = ("--load", str(saved), "--snip-dir", str(run))
        args = tiny_llama_args(*case.arguments.split(), *loading, iters=case.steps)
        process = self._warm.succeed(case.ranks, args, tmp=run.parent, timeout=600)
        assert process.stdout.count("holds no SNIP state") == 1
        adopted, expected = ([e["step"] for e in events(each, "adopt")] for each in (run, self.whole(name)))
        assert adopted == expected


def _resharded(place: str) -> Interrupted:
    ranks, arguments = PLACES[place]
    return Interrupted(ranks, " ".join([*MODEL, _RESHARDED, arguments]), RESHARDED_STEPS)


def _choices(run: Path, point: int) -> dict[int, Mapping[str, Any]]:
    """Return the maps adopted after ``point``. A resume at ``point`` adopts the map in force there again."""
    maps: dict[int, PrecisionMap] = read_maps(run)
    return {step: precision_map.choices for step, precision_map in maps.items() if step > point}


_DECISIONS = ("submit", "adopt", "guard", "postpone", "skipped", "dropped", "solve_failed")
_FIELDS = ("step", "event", "version", "action", "alarm_step", "loss", "limit", "drift", "since", "changed", "until")


def excess(run: Path, adopted: int, choices: Mapping[str, Any]) -> float:
    """Return the relative cost of ``choices`` over the map of step ``adopted``, by the scores of that update."""
    step = max(e["step"] for e in read_events(run) if e["event"] == "submit" and e["step"] <= adopted)
    problem = Problem.from_json((run / "problems" / f"step_{step}.json").read_bytes(), where="problem")
    costs = []
    for chosen in (choices, read_maps(run)[adopted].choices):
        by_item = [{c.format: c.loss for c in item.choices}[chosen[item.id]] for item in problem.items]
        costs.append(math.fsum(by_item))
    return costs[0] / costs[1] - 1.0


def _later_decisions(run: Path, whole: Path, point: int, besides: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return what was decided from ``point`` on, without times and the fields ``besides``.

    A resumed run adopts the map in force of its checkpoint again: this is left out. Without one, an adoption at
    ``point`` is the pending update's own.
    """
    decisions = [
        {name: event[name] for name in _FIELDS if name in event and name not in besides}
        for event in read_events(run)
        if event["event"] in _DECISIONS and event["step"] >= point
    ]
    resumed = any(event["event"] == "resume" for event in read_events(run)) and "map in force" in state_at(whole, point)
    if resumed and decisions and decisions[0]["event"] == "adopt" and decisions[0]["step"] == point:
        del decisions[0]
    return decisions


def state_at(run: Path, point: int) -> str:
    """Return what the checkpoint after ``point`` steps holds, in words."""
    pending, in_force = False, False
    for event in read_events(run):
        if event["step"] < point:
            if event["event"] == "submit":
                pending = True
            if event["event"] == "adopt":
                pending, in_force = False, True
    return ", ".join(["map in force" if in_force else "no map", *(["update on its way"] if pending else [])])
