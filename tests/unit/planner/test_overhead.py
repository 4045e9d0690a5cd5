"""SNIP's own cost: counted as the code that pays it counts."""

from __future__ import annotations

import pytest

from snip_megatron.planner.overhead import Probes, overhead, probe_microbatches, table_entries
from snip_megatron.planner.step_time import ALL_BF16
from snip_megatron.precision import LINEAR_KINDS, LinearId

from .formula import SMALL, layout, step_model, with_blocks


@pytest.mark.parametrize(("blocks", "formats"), [(1, 1), (8, 2), (80, 3)])
def test_the_table_has_the_entries_that_ranks_reduce(blocks: int, formats: int) -> None:
    reduction = pytest.importorskip("snip_megatron.statistics.reduction")
    from snip_megatron.statistics.table import SinkRow

    names = [str(LinearId(layer, kind)) for layer in range(blocks) for kind in LINEAR_KINDS]
    sinks = tuple(SinkRow(f"sink{i}", 0, 1) for i in range(2 * blocks + 2))  # embedding, two norms a block, last norm
    shape = reduction.TableShape(tuple(names), ("fp8", "fp4", "fp8_tensor")[:formats], sinks)
    entries = sum(array.numel() for array in reduction.PartialTable(shape, 1.0).arrays.values())
    assert table_entries(len(names), formats) == entries


def test_the_broadcast_is_the_channels() -> None:
    adoption = pytest.importorskip("snip_megatron.adoption")
    torch = pytest.importorskip("torch")
    chosen = layout("70b", tp=8, pp=8)
    names = [str(LinearId(layer, kind)) for layer in range(80) for kind in LINEAR_KINDS]
    channel = adoption.MapChannel(names, torch.device("cpu"))
    message = channel._encode(adoption.Decision(adoption.Verdict.NOT_READY))
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    assert overhead(chosen, Probes(), 2, step, step).broadcast == len(message)


@pytest.mark.parametrize(
    ("probes", "passes"),
    [(Probes(), 2), (Probes(estimator="fisher"), 1), (Probes(backward_noise=True), 3)],
)
def test_passes(probes: Probes, passes: int) -> None:
    chosen = layout("8b", dp=2, global_batch_size=16)
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    costs = overhead(chosen, probes, 2, step, step)
    assert (costs.passes, costs.microbatches) == (passes, passes)
    assert costs.seconds == pytest.approx(passes * step.slowest / 8)
    assert costs.share == pytest.approx(costs.seconds / (costs.seconds + 1000 * step.total))
    assert (costs.gradient_bytes > 0) == (passes > 1)


def test_interleaved_schedules_probe_whole_groups() -> None:
    chosen = layout(with_blocks(SMALL, 16), pp=4, vpp=2, global_batch_size=8)
    assert probe_microbatches(chosen, Probes(microbatches=1)) == 4
    assert probe_microbatches(chosen, Probes(microbatches=5)) == 8
    assert probe_microbatches(layout(), Probes(microbatches=100)) == 8


def test_one_data_parallel_rank_reduces_nothing_over_others() -> None:
    chosen = layout("8b")
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    costs = overhead(chosen, Probes(), 2, step, step)
    assert (costs.column_bytes, costs.gradient_bytes) == (0, 0)
