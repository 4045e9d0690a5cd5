"""An injected loss spike takes the map back, on all ranks at one step; resumed and replayed runs agree bit for bit."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.records.readers import read_events, read_maps, read_metrics

STEPS = 24
SNIP = shlex.split(
    "--snip --snip-first-update 10 --snip-update-interval 9 --snip-lag 4 --snip-wait 120 --snip-guard-steps 6"
    " --pipeline-model-parallel-size 2 --num-layers 2"
)
SPIKES = {"ALTER": "spike", "SPIKES": "16,19"}  # the map is adopted at 14; figures of 18 arrive after 19


def train(warm: WarmRanks, tmp: Path, name: str, *extra: str, steps: int = STEPS) -> Path:
    run = tmp / name
    args = tiny_llama_args(*SNIP, "--snip-dir", str(run), *extra, iters=STEPS)
    if steps < STEPS:
        args += ["--exit-interval", str(steps)]
    warm.succeed(2, args, module="altered_pretrain", env=SPIKES, tmp=tmp / f"{name}.ranks", timeout=200)
    return run


def of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


def curve(run: Path, start: int = 0) -> list[tuple[int, float, float]]:
    return [(m["step"], m["loss"], m["grad_norm"]) for m in read_metrics(run) if m["step"] >= start]


@pytest.fixture(scope="module")
def spiked(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(warm, tmp_path_factory.mktemp("guard"), "whole", "--save", "whole.ckpt", "--save-interval", "19")


def test_the_map_is_taken_back_and_the_next_must_promise_more(spiked: Path) -> None:
    guards = of(spiked, "guard")
    assert [(event["step"], event["action"]) for event in guards] == [(20, "taken_back"), (23, "refused")]
    assert guards[0]["alarm_step"] == 18
    assert guards[0]["loss"] > guards[0]["limit"]
    assert [event["step"] for event in of(spiked, "adopt")] == [14, 20]
    shares = [metric["fp4_fraction"] for metric in read_metrics(spiked)]
    assert shares[13:21] == [0.0, *[pytest.approx(0.75, abs=0.05)] * 6, 0.0]
    assert set(read_maps(spiked)) == {14, 20}


def test_resumed_after_the_last_spike_it_is_taken_back_at_the_same_step(
    warm: WarmRanks, spiked: Path, tmp_path: Path
) -> None:
    """The checkpoint after 19 steps holds two spikes counted and the figures of the third on their way."""
    checkpoint = next(spiked.parent.rglob("whole.ckpt"))
    kept = tmp_path / "ckpt"
    shutil.copytree(checkpoint, kept)
    (kept / "latest_checkpointed_iteration.txt").write_text("19")
    run = train(warm, tmp_path, "resumed", "--load", str(kept))
    assert [(event["step"], event["action"]) for event in of(run, "guard")] == [(20, "taken_back"), (23, "refused")]
    assert curve(run) == curve(spiked, 19)


def test_a_replay_repeats_what_the_guard_did(warm: WarmRanks, spiked: Path, tmp_path: Path) -> None:
    run = train(warm, tmp_path, "replay", "--snip-replay", str(spiked))
    assert [event["step"] for event in of(run, "adopt")] == [14, 20]
    assert curve(run) == curve(spiked)
