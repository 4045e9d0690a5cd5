"""What the round trip of checkpoints takes to be equal. The runs themselves: tests/gpu/test_te_checkpoints.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.jobs.te_round_trip import compare_losses, compare_weights, weights

ORIGINAL = {"a": "1", "b": "2", "a._extra_state": ""}
TRAINED = {"a": "3", "b": "4", "a._extra_state": ""}


def test_equal_weights() -> None:
    found = compare_weights(ORIGINAL, {"there": ORIGINAL, "back": dict(ORIGINAL)}, {"on": TRAINED})
    assert found["equal"]
    assert (found["tensors"], found["entries"]) == (2, 3)
    assert found["digest"] != compare_weights(TRAINED, {}, {})["digest"]


@pytest.mark.parametrize(
    ("copy", "trained", "field", "named"),
    [
        ({**ORIGINAL, "b": "0"}, TRAINED, "differences", {"there": ["b"]}),
        ({"a": "1", "b": "2"}, TRAINED, "keys_of_one_only", {"there": ["a._extra_state"], "on": []}),
        (ORIGINAL, {**TRAINED, "c": "5"}, "keys_of_one_only", {"there": [], "on": ["c"]}),
        (ORIGINAL, {**TRAINED, "a": "1"}, "untouched_by_training", {"on": ["a"]}),
    ],
)
def test_unequal_weights(copy: dict[str, str], trained: dict[str, str], field: str, named: object) -> None:
    found = compare_weights(ORIGINAL, {"there": copy}, {"on": trained})
    assert not found["equal"]
    assert found[field] == named


def test_no_weights_are_not_equal() -> None:
    assert not compare_weights({}, {"there": {}}, {})["equal"]


@pytest.mark.parametrize(
    ("found", "equal"),
    [({5: 2.0, 6: 1.0}, True), ({5: 2.001, 6: 1.0}, True), ({5: 2.1, 6: 1.0}, False), ({5: 2.0}, False)],
)
def test_losses(found: dict[int, float], equal: bool) -> None:
    runs = {"stock": {4: 3.0}, "snip": found, "stock_after_snip": {7: 1.0}}
    compared = compare_losses({**runs, "control": {5: 2.0, 6: 1.0}, "control_after_control": {7: 1.0}})
    assert compared["equal"] == equal
    assert (compared["largest_relative_difference"] <= compared["tolerance"]) == equal


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """Every bit counts; the optimizer's tensors and SNIP's own state do not."""
    state = {"layer.weight": torch.zeros(3), "optimizer.exp_avg": torch.ones(3), "snip.state": torch.ones(1)}
    dcp.save(state, checkpoint_id=tmp_path / "one", no_dist=True)
    dcp.save({**state, "layer.weight": -torch.zeros(3)}, checkpoint_id=tmp_path / "other", no_dist=True)
    one, other = weights(tmp_path / "one"), weights(tmp_path / "other")
    assert one.keys() == other.keys() == {"layer.weight"}
    assert one != other
