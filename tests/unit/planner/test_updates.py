"""What an update costs: its passes, and capturing CUDA graphs anew."""

from __future__ import annotations

from typing import Any

import pytest

from snip_megatron.config import SnipConfig
from snip_megatron.planner.rates import Links
from snip_megatron.planner.updates import Update, update_cost

from .formula import layout


def cost(recapture: float | None = None, config: SnipConfig | None = None, **sizes: Any) -> Update:
    seconds = {"work": 1.0, "bf16": 1.1, "running": 1.0}
    return update_cost(
        layout("1b", **sizes), config or SnipConfig(enabled=True), links=Links(), recapture=recapture, **seconds
    )


def test_a_fixed_map_measures_nothing() -> None:
    found = cost(config=SnipConfig(enabled=True, policy="uniform-fp8"), dp=2, cuda_graph_impl="full_iteration")
    assert (found.passes, found.microbatches, found.seconds, found.recapture_seconds) == (0, 0, 0, 0)


def test_cuda_graphs_are_captured_anew() -> None:
    whole = cost(0.01, cuda_graph_impl="full_iteration", global_batch_size=2)
    assert whole.recapture_seconds == whole.least_recapture_seconds == pytest.approx(22 * 2 * 0.01)
    single = cost(0.01, cuda_graph_impl="transformer_engine")
    assert (single.least_recapture_seconds, single.recapture_seconds) == pytest.approx((0.01, 0.22))
    assert cost(0.01).recapture_seconds == 0
