"""What an update costs: its passes, as the code that pays them counts."""

from __future__ import annotations

from snip_megatron.config import SnipConfig
from snip_megatron.planner.rates import Links
from snip_megatron.planner.updates import update_cost

from .formula import layout


def test_a_fixed_map_measures_nothing() -> None:
    config = SnipConfig(enabled=True, policy="uniform-fp8")
    found = update_cost(layout("8b", dp=2), config, Links(), work=1.0, bf16=1.1, running=1.0)
    assert (found["passes"], found["microbatches"], found["seconds"]) == (0, 0, 0)
