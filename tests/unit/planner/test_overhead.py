"""SNIP's own cost: counted as the code that pays it counts."""

from __future__ import annotations

from snip_megatron.config import SnipConfig
from snip_megatron.planner.overhead import overhead
from snip_megatron.timing.shapes import ALL_BF16

from .formula import layout, step_model


def test_a_fixed_map_measures_nothing() -> None:
    chosen = layout("8b", dp=2, global_batch_size=16)
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    costs = overhead(chosen, SnipConfig(enabled=True, policy="uniform-fp8"), step, step)
    assert (costs.passes, costs.microbatches, costs.seconds) == (0, 0, 0)
