"""Real ranks, one of which has no memory for a probe: no rank probes, and training goes on under its map."""

from __future__ import annotations

import shlex
from pathlib import Path

from launch import losses, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.records.readers import read_events

SNIP = shlex.split("--snip --snip-first-update 2 --snip-update-interval 5 --snip-lag 1 --snip-wait 120")
STEPS = 10


def test_a_rank_without_memory_leaves_the_update_out_for_all(warm: WarmRanks, tmp_path: Path) -> None:
    """The update of step 2 finds rank 1 short, that of step 7 finds memory enough."""
    layout = ("--use-distributed-optimizer",)
    run = tmp_path / "run"
    args = tiny_llama_args(*layout, *SNIP, "--snip-dir", str(run), iters=STEPS)
    tight = warm.run(2, args, module="tight_pretrain", env={"TIGHT": "1,5"}, tmp=tmp_path / "tight")
    assert tight.returncode == 0, tight.stderr[-4000:]
    events = list(read_events(run))
    (dropped,) = [event for event in events if event["event"] == "dropped"]
    assert (dropped["step"], dropped["rank"], dropped["free_bytes"]) == (2, 1, 1024.0)
    assert dropped["needed_bytes"] > 2.0**20
    assert dropped["reason"].startswith("not enough memory: rank 1 has 0.00 GiB free, a probe may take 0.")
    assert "the update of step 2 is dropped: not enough memory: rank 1 " in tight.stdout
    assert {event["step"] for event in events if event["event"] in ("probe", "submit")} == {7}
    (adopted,) = [event for event in events if event["event"] == "adopt" and event["changed"]]
    assert adopted["step"] == 8
    plain = warm.run(2, tiny_llama_args(*layout, iters=STEPS), tmp=tmp_path / "plain")
    before = {step: loss for step, loss in losses(plain).items() if step <= adopted["step"]}
    assert len(before) == 8
    assert {step: loss for step, loss in losses(tight).items() if step in before} == before
    assert len(losses(tight)) == STEPS
