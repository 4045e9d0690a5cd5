"""What SNIP itself costs: bytes that an update moves, passes that it runs, their share of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.probes import (
    Probes,
    calls,
    measurements,
    microbatches_by_kind,
    probe_microbatches,
    trials,
)
from snip_megatron.planner.rates import Links
from snip_megatron.planner.step_time import StepTime
from snip_megatron.precision import LINEAR_KINDS
from snip_megatron.statistics.table import BOUNDARY_COLUMNS, FORMAT_COLUMNS, LINEAR_COLUMNS, RHO_GRID

ASSUMPTIONS = (
    "probes: each pass is a bf16 forward and backward of a microbatch, each call fills the pipeline once; what"
    " recording adds to the statistics pass, and what evaluating the optimizer adds for every option that estimator"
    " measured forces, is not modelled; gradients go over data parallel ranks exposed, at most as often as stated",
)

_FLOAT64, _FLOAT32 = 8, 4
_LAYOUT_COLUMNS = 3  # stage, n, k
_META_BYTES = 4096  # the map's figures, padded
_STEP_FIGURES = 2  # the loss and how many ranks have it, in one small collective a step


@dataclass(frozen=True)
class Overhead:
    """Of one update.

    Attributes:
        gathered: bytes that every rank contributes to all-reduces of the statistics table over all ranks.
        column_bytes: bytes of column norms reduced over data parallel ranks, a rank at most.
        gradient_bytes: bytes of the probe's gradient reduced over data parallel ranks, a rank at most.
        broadcast: bytes of the map's broadcast. per_step: bytes of the collective that every step carries.
        passes: calls of the pipeline's schedule. microbatches: that a rank runs in them.
        by_kind: kind of ``probe`` event → microbatches that a rank runs for it.
        steps: their time in bf16 steps. seconds: their time. reducing_seconds: the part of it in which the probe's
            gradients go over data parallel ranks.
        share: of the training time between two updates.
    """

    gathered: int
    column_bytes: int
    gradient_bytes: int
    broadcast: int
    per_step: int
    passes: int
    microbatches: int
    by_kind: Mapping[str, int]
    steps: float
    seconds: float
    reducing_seconds: float
    share: float


def overhead(
    layout: Layout,
    probes: Probes,
    formats: Sequence[str],
    bf16: StepTime,
    running: StepTime,
    links: Links | None = None,
) -> Overhead:
    """An update that measures ``formats`` (without bf16), between steps that take as long as ``running``."""
    made = calls(layout, probes, formats)
    linears = layout.model.blocks * len(LINEAR_KINDS)
    ends = (layout.pp - 1) / layout.vpp
    passing = sum(call.microbatches + ends for call in made) / layout.microbatches * bf16.slowest
    shapes = layout.linear_shapes().values()
    columns = max(len(blocks) for blocks in layout.stages) * sum(s.n + s.k for s in shapes) * (1 + len(formats))
    parameters = max(layout.probed_parameters(stage) for stage in range(layout.pp))
    several = layout.dp > 1 and probes.updates
    reduced = _FLOAT32 * parameters * _reductions(layout, probes, formats) if several else 0
    reducing = 2.0 * (layout.dp - 1) / layout.dp * reduced / (links or Links()).of(layout.tp * layout.dp)
    seconds = passing + reducing
    return Overhead(
        gathered=_gathered(layout, probes, formats, linears) * _FLOAT64,
        column_bytes=columns * _FLOAT64 if several else 0,
        gradient_bytes=reduced,
        broadcast=1 + 3 * linears + _META_BYTES,
        per_step=_STEP_FIGURES * _FLOAT64,
        passes=len(made),
        microbatches=sum(call.microbatches for call in made),
        by_kind=microbatches_by_kind(made),
        steps=seconds / bf16.total,
        seconds=seconds,
        reducing_seconds=reducing,
        share=seconds / (seconds + probes.interval * running.total),
    )


def _gathered(layout: Layout, probes: Probes, formats: Sequence[str], linears: int) -> int:
    """Numbers that every rank contributes to all-reduces over all ranks."""
    if not probes.updates:
        return 0
    count = (3 if probes.drift else 2) * table_entries(linears, len(formats))
    if probes.hessian:
        count += 2 * probes.hessian_probes * linears
    if probes.forces:
        forced = len(trials(layout, probes, formats))
        sizes = 1 if probe_microbatches(layout, probes) == layout.microbatches else 2  # at which drift is evaluated
        rows = linears + _sinks(linears)
        count += measurements(probes) * (rows * (forced * (sizes + 2) + 1) + 2 * forced)
    return count


def _reductions(layout: Layout, probes: Probes, formats: Sequence[str]) -> int:
    """Times that a rank's gradients go over data parallel ranks, at most: an option's dgrad reaches earlier blocks."""
    forced = measurements(probes) * (1 + len(trials(layout, probes, formats))) if probes.forces else 0
    return int(probes.drift) + forced


def table_entries(linears: int, formats: int) -> int:
    """Numbers in the statistics table that an all-reduce carries."""
    boundaries = 2 * (linears // len(LINEAR_KINDS)) + 1
    each = len(LINEAR_COLUMNS) + len(FORMAT_COLUMNS) * formats + len(RHO_GRID) + _LAYOUT_COLUMNS
    return linears * each + boundaries * len(BOUNDARY_COLUMNS) + _sinks(linears) * (len(RHO_GRID) + 1)


def _sinks(linears: int) -> int:
    """The norms' weights and the word embedding."""
    return 2 * (linears // len(LINEAR_KINDS)) + 2
