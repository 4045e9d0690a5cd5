"""Real ranks, one of which has little memory: all of them probe as many sequences as fit there, or none."""

import shlex
from pathlib import Path

import pytest
from launch import losses, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.records.readers import read_events

SNIP = shlex.split("--snip --snip-first-update 2 --snip-update-interval 3 --snip-lag 1 --snip-wait 120")
STEPS, SEQUENCE, FREE = 12, 64, (2**10, 2**40, 14 * 2**20)


@pytest.mark.parametrize(
    ("layout", "data_parallel"),
    [
        ("--use-distributed-optimizer --global-batch-size 16", 2),
        ("--pipeline-model-parallel-size 2", 1),
    ],
)
def test_all_ranks_probe_what_fits_on_the_smallest(
    warm: WarmRanks, tmp_path: Path, layout: str, data_parallel: int
) -> None:
    """Rank 1 has too little memory for a sequence at step 2, plenty at step 5, and enough for a few at step 8."""
    run, given = tmp_path / "run", ["--micro-batch-size", "8", "--global-batch-size", "8", *shlex.split(layout)]
    args = tiny_llama_args(*given, *SNIP, "--snip-dir", str(run), iters=STEPS)
    environment = {"ALTER": "tight", "TIGHT": ",".join(map(str, (1, *FREE, *[2**40] * 9)))}
    tight = warm.succeed(2, args, module="altered_pretrain", env=environment, tmp=tmp_path / "tight")
    events = list(read_events(run))
    (dropped,) = [event for event in events if event["event"] == "dropped"]
    assert (dropped["step"], dropped["rank"], dropped["free_bytes"]) == (2, 1, 1024.0)
    assert dropped["needed_bytes"] > 2.0**20
    assert "the update of step 2 is dropped: not enough memory: rank 1 has 0.00 GiB free" in tight.stdout
    taken = {e["step"]: e["tokens"] / (data_parallel * SEQUENCE) for e in events if e["event"] == "probe"}
    assert taken[5] == 8
    assert taken[8] in (1, 2, 4)
    assert taken[11] == taken[8]  # also where memory is free again
    plain = warm.run(2, tiny_llama_args(*given, iters=STEPS), tmp=tmp_path / "plain")
    (adopted, *_) = [event for event in events if event["event"] == "adopt" and event["changed"]]
    before = {step: loss for step, loss in losses(plain).items() if step <= adopted["step"]}
    assert len(before) == adopted["step"] == 6
    assert {step: loss for step, loss in losses(tight).items() if step in before} == before
    assert len(losses(tight)) == STEPS
