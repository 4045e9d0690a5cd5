"""An injected loss spike takes the map back, on all ranks at one step.

Resumed runs take it back at the same step: tests/unit/runtime/test_controller_guard.py. A replay has no guard:
it adopts what was recorded.
"""

import shlex
from pathlib import Path

import pytest
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.records.readers import read_events, read_maps, read_metrics

SNIP = shlex.split(
    "--snip --snip-first-update 10 --snip-update-interval 9 --snip-lag 4 --snip-wait 120 --snip-guard-steps 6"
    " --pipeline-model-parallel-size 2 --num-layers 2"
)
SPIKES = {"ALTER": "spike", "SPIKES": "16,19"}  # the map is adopted at 14; figures of 18 arrive after 19


def test_the_map_is_taken_back_and_the_next_must_promise_more(warm: WarmRanks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = tiny_llama_args(*SNIP, "--snip-dir", str(run), iters=24)
    warm.succeed(2, args, module="altered_pretrain", env=SPIKES, tmp=tmp_path / "ranks", timeout=200)
    guards = [event for event in read_events(run) if event["event"] == "guard"]
    assert [(event["step"], event["action"]) for event in guards] == [(20, "taken_back"), (23, "refused")]
    assert guards[0]["alarm_step"] == 18
    assert guards[0]["loss"] > guards[0]["limit"]
    assert [event["step"] for event in read_events(run) if event["event"] == "adopt"] == [14, 20]
    shares = [metric["fp4_fraction"] for metric in read_metrics(run)]
    assert shares[13:21] == [0.0, *[pytest.approx(0.75, abs=0.05)] * 6, 0.0]
    assert set(read_maps(run)) == {14, 20}
