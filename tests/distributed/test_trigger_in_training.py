"""An update starts by itself when gradients move against each other, on all ranks at one step, resumed or not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.records.readers import read_events, read_metrics

JUMP, STEPS, SAVED = 60, 78, 71
# The interval is out of reach: what starts after step 1 the trigger has started.
SNIP = shlex.split(
    "--snip --snip-first-update 1 --snip-update-interval 0 --snip-lag 2 --snip-wait 120 --snip-settings trigger=0.2"
    " --num-layers 2 --lr 1e-4 --min-lr 1e-4 --lr-decay-style constant --lr-warmup-iters 0"
)


def train(
    warm: WarmRanks, tmp: Path, name: str, nproc: int, *extra: str
) -> tuple[list[dict[str, Any]], dict[int, float | None]]:
    """(events without their times, losses by step)."""
    run = tmp / name
    args = tiny_llama_args(*SNIP, "--snip-dir", str(run), "--exit-interval", str(STEPS), *extra, iters=100)
    process = warm.run(nproc, args, module="jumping_pretrain", env={"JUMP": str(JUMP)}, tmp=tmp / f"{name}-out")
    assert process.returncode == 0, process.stderr[-4000:]
    told = []
    for event in read_events(run):
        if event["event"] in ("trigger", "submit", "adopt"):
            kept = ("step", "event", "drift", "since", "version", "changed", "fp4_fraction")
            told.append({key: event[key] for key in kept if key in event})
    return told, {figure["step"]: figure["loss"] for figure in read_metrics(run)}


def test_a_jump_of_the_learning_rate_starts_an_update_and_a_checkpoint_does_not_change_it(
    warm: WarmRanks, tmp_path: Path
) -> None:
    """On two ranks with a sharded optimizer. The checkpoint lies between the look at step 70 and what comes of it."""
    sharded = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
    saving = ("--save", str(tmp_path / "ckpt"), "--save-interval", str(SAVED))
    events, curve = train(warm, tmp_path, "whole", 2, *sharded, *saving)
    assert [(e["step"], e["event"]) for e in events] == [
        (1, "submit"),
        (3, "adopt"),
        (72, "trigger"),
        (72, "submit"),
        (74, "adopt"),
    ]
    assert events[2]["drift"] > 0.2
    assert events[2]["since"] == 3

    resuming = ("--load", str(tmp_path / "ckpt"), "--ckpt-step", str(SAVED))
    resumed, again = train(warm, tmp_path, "resumed", 2, *sharded, *resuming)
    assert again == {step: loss for step, loss in curve.items() if step >= SAVED}
    # The map in force comes out of the checkpoint first.
    assert resumed[1:] == events[2:]
