"""SNIP's own cost: counted as the code that pays it counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from snip_megatron.planner.overhead import overhead, table_entries
from snip_megatron.planner.probes import Probes, probe_microbatches
from snip_megatron.precision import LINEAR_KINDS, Format, LinearId, PrecisionMap
from snip_megatron.timing.shapes import ALL_BF16

from .formula import SMALL, layout, step_model, with_blocks

FORMATS = ("fp8", "fp4")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    adoption = pytest.importorskip("snip_megatron.runtime.adoption")
    torch = pytest.importorskip("torch")
    chosen = layout("70b", tp=8, pp=8)
    names = [str(LinearId(layer, kind)) for layer in range(80) for kind in LINEAR_KINDS]
    channel = adoption.MapChannel(names, torch.device("cpu"))
    stages = {str(stage): 0.751234 for stage in range(8)}
    found = PrecisionMap.uniform(names, Format.FP4, status="optimal", objective=1.5e-3, achieved_per_stage=stages)
    message = channel._encode(adoption.Decision(adoption.Verdict.MAP, found))
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    assert overhead(chosen, Probes(), FORMATS, step, step).broadcast == pytest.approx(len(message), rel=0.1)


@pytest.mark.parametrize(
    ("probes", "passes"),
    [
        (Probes(), 2),
        (Probes(estimator="fisher"), 1),
        (Probes(backward_noise=True), 3),
        (Probes(policy="random"), 1),
    ],
)
def test_passes(probes: Probes, passes: int) -> None:
    chosen = layout("8b", dp=2, global_batch_size=16)
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    costs = overhead(chosen, probes, FORMATS, step, step)
    assert (costs.passes, costs.microbatches) == (passes, passes)
    assert costs.reducing_seconds == pytest.approx(costs.gradient_bytes / 350e9)  # 2 (n − 1) / n is 1 of two ranks
    assert costs.seconds == pytest.approx(passes * step.slowest / 8 + costs.reducing_seconds)
    assert costs.share == pytest.approx(costs.seconds / (costs.seconds + 1000 * step.total))
    assert (costs.gradient_bytes > 0) == probes.drift


def test_a_fixed_map_measures_nothing() -> None:
    chosen = layout("8b", dp=2, global_batch_size=16)
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    costs = overhead(chosen, Probes(policy="uniform-fp8"), FORMATS, step, step)
    assert (costs.passes, costs.gathered, costs.gradient_bytes, costs.column_bytes, costs.seconds) == (0, 0, 0, 0, 0)


def test_interleaved_schedules_probe_whole_groups() -> None:
    chosen = layout(with_blocks(SMALL, 16), pp=4, vpp=2, global_batch_size=8)
    assert probe_microbatches(chosen, Probes(microbatches=1)) == 4
    assert probe_microbatches(chosen, Probes(microbatches=5)) == 8
    assert probe_microbatches(layout(), Probes(microbatches=100)) == 8


def test_one_data_parallel_rank_reduces_nothing_over_others() -> None:
    chosen = layout("8b")
    step = step_model(chosen).step(lambda block, kind: ALL_BF16)
    costs = overhead(chosen, Probes(), FORMATS, step, step)
    assert (costs.column_bytes, costs.gradient_bytes) == (0, 0)
