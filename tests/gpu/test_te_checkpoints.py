"""A checkpoint goes from stock Transformer Engine Megatron to SNIP and back: same entries, same bits, same losses.

``SNIP_TE_ROUND_TRIP=FILE`` keeps the result as JSON, with device, versions, commit and command.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import header, write
from benchmarks.jobs.te_round_trip import round_trip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = round_trip(tmp_path_factory.mktemp("round_trip"))
    if out := os.environ.get("SNIP_TE_ROUND_TRIP"):
        write(Path(out), header(None) | found)
    return found


def test_every_weight_comes_through_with_its_bits(result: dict[str, Any]) -> None:
    """To SNIP, and back to stock; and both have really trained in between."""
    weights = result["weights"]
    assert not any(weights["differences"].values()), weights["differences"]
    assert not any(weights["untouched_by_training"].values()), weights["untouched_by_training"]
    assert weights["tensors"] >= 9
    assert weights["equal"]


def test_entries_of_the_model_are_the_same(result: dict[str, Any]) -> None:
    """Extra states of Transformer Engine's modules included: none too few for stock to load, none too many."""
    assert not any(result["weights"]["keys_of_one_only"].values()), result["weights"]["keys_of_one_only"]


def test_losses_are_those_without_snip(result: dict[str, Any]) -> None:
    """SNIP continues from stock's checkpoint, stock from SNIP's."""
    losses = result["losses"]
    assert sorted(losses["through_snip"]) == list(range(5, 13))
    assert losses["largest_relative_difference"] <= losses["tolerance"]
    assert losses["equal"]
