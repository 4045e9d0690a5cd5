"""SNIP's own cost: counted as the code that pays it counts."""

from __future__ import annotations

import pytest

from snip_megatron.config import SnipConfig
from snip_megatron.planner.overhead import overhead, table_entries
from snip_megatron.precision import LinearRow, dense_names
from snip_megatron.timing.shapes import ALL_BF16

from .formula import layout, step_model


@pytest.mark.parametrize(("blocks", "formats"), [(1, 1), (8, 2), (80, 3)])
def test_the_table_has_the_entries_that_ranks_reduce(blocks: int, formats: int) -> None:
    reduction = pytest.importorskip("snip_megatron.statistics.reduction")
    from snip_megatron.statistics.table import SinkRow

    rows = tuple(LinearRow(name, 0, 1, 1) for name in dense_names(blocks))
    sinks = tuple(SinkRow(f"sink{i}", 0, 1) for i in range(2 * blocks + 2))  # embedding, two norms a block, last norm
    shape = reduction.TableShape(rows, ("fp8", "fp4", "fp8_tensor")[:formats], sinks)
    entries = sum(array.numel() for array in reduction.PartialTable(shape, 1.0).arrays.values())
    assert table_entries(len(rows), formats) == entries


def test_a_fixed_map_measures_nothing() -> None:
    chosen = layout("8b", dp=2, global_batch_size=16)
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    costs = overhead(chosen, SnipConfig(enabled=True, policy="uniform-fp8"), step, step)
    assert (costs.passes, costs.gathered, costs.gradient_bytes, costs.column_bytes, costs.seconds) == (0, 0, 0, 0, 0)
