"""A configuration of ``snip launch`` with a tiny model, same arguments, on real ranks: trained under SNIP, resumed."""

from pathlib import Path
from typing import Any

from warm_ranks import WarmRanks

from snip_megatron.runtime.run_data import read_events, read_metrics
from snip_megatron.tools.launch import make_job, megatron_arguments

STEPS, RANKS = 10, 2


def train(wishes: dict[str, Any], warm: WarmRanks, tmp: Path) -> Path:
    """The run directory."""
    job = make_job(**wishes)
    assert job.layout.ranks == RANKS
    warm.succeed(RANKS, megatron_arguments(job), tmp=tmp)
    return job.save / "snip"


def test_a_shrunk_configuration_trains_and_goes_on(tmp_path: Path, warm: WarmRanks) -> None:
    wishes = {
        "name": "70b", "tp": 2, "pp": 1, "nodes": 1, "gpus_per_node": RANKS, "smoke": True,
        "save": tmp_path / "ckpt", "extra": ("--exit-interval", str(STEPS)),
    }  # fmt: skip
    run = train(wishes, warm, tmp_path / "ranks")
    assert [figure["step"] for figure in read_metrics(run)] == list(range(STEPS))
    (adopted,) = (event for event in read_events(run) if event["event"] == "adopt")
    assert (adopted["step"], adopted["status"]) == (6, "optimal")
    assert adopted["achieved"] >= 0.75
    # The same wishes again: it goes on from its own checkpoint.
    again = wishes | {"extra": ("--exit-interval", str(STEPS + 2))}
    assert make_job(**again).load == tmp_path / "ckpt"
    train(again, warm, tmp_path / "again")
    assert [figure["step"] for figure in read_metrics(run)] == list(range(STEPS + 2))
