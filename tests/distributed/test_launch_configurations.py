"""Configurations of ``snip launch`` with a tiny model, same arguments, on real ranks: trained under SNIP, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from warm_ranks import WarmRanks

from snip_megatron.launch.job import make_job, megatron_arguments
from snip_megatron.records.readers import read_events, read_metrics

STEPS = 10


def train(wishes: dict[str, Any], ranks: int, warm: WarmRanks, tmp: Path) -> Path:
    """The run directory."""
    job = make_job(**wishes)
    assert job.layout.ranks == ranks
    process = warm.run(ranks, megatron_arguments(job), tmp=tmp)
    assert process.returncode == 0, process.stderr[-4000:]
    return job.save / "snip"


@pytest.mark.parametrize(
    ("name", "tp", "pp", "ranks"),
    [
        ("3b", 1, 1, 2),
        ("70b", 2, 1, 2),
    ],
    ids=["3b-dp2-selective", "70b-tp2"],
)
def test_a_shrunk_configuration_trains(
    name: str, tp: int, pp: int, ranks: int, tmp_path: Path, warm: WarmRanks
) -> None:
    wishes = {
        "configuration": name, "tp": tp, "pp": pp, "nodes": 1, "gpus_per_node": ranks, "smoke": True,
        "save": tmp_path / "ckpt", "extra": ("--exit-interval", str(STEPS)),
    }  # fmt: skip
    run = train(wishes, ranks, warm, tmp_path / "ranks")
    assert [figure["step"] for figure in read_metrics(run)] == list(range(STEPS))
    (adopted,) = (event for event in read_events(run) if event["event"] == "adopt")
    assert (adopted["step"], adopted["status"]) == (6, "optimal")
    assert adopted["achieved"] >= 0.75
    if name != "3b":
        return
    # The same wishes again: it goes on from its own checkpoint.
    again = wishes | {"extra": ("--exit-interval", str(STEPS + 2))}
    assert make_job(**again).load == tmp_path / "ckpt"
    train(again, ranks, warm, tmp_path / "again")
    assert [figure["step"] for figure in read_metrics(run)] == list(range(STEPS + 2))
