"""What SNIP itself costs: bytes that an update moves, passes that it runs, their share of training."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.step_time import StepTime
from snip_megatron.precision import LINEAR_KINDS
from snip_megatron.statistics.table import BOUNDARY_COLUMNS, FORMAT_COLUMNS, LINEAR_COLUMNS, RHO_GRID

ASSUMPTIONS = (
    "probes: each pass is one bf16 forward and backward of the probe's microbatches through the whole pipeline; what"
    " recording adds to the statistics pass is not modelled",
)

_FLOAT64, _FLOAT32 = 8, 4
_LAYOUT_COLUMNS = 3  # stage, n, k
_META_BYTES = 4096  # the map's figures, padded
_STEP_FIGURES = 2  # the loss and how many ranks have it, in one small collective a step
ESTIMATORS = ("noise", "fisher")


@dataclass(frozen=True)
class Probes:
    """What an update runs, as the ``--snip-*`` arguments of the same names say."""

    microbatches: int = 1
    tokens: int = 512
    estimator: str = "noise"
    backward_noise: bool = False
    interval: int = 1000

    @property
    def passes(self) -> int:
        """Statistics, forward noise, backward noise."""
        if self.estimator == "fisher":
            return 1
        return 3 if self.backward_noise else 2


@dataclass(frozen=True)
class Overhead:
    """Of one update.

    Attributes:
        gathered: bytes that every rank contributes to all-reduces of the statistics table over all ranks.
        column_bytes: bytes of column norms reduced over data parallel ranks, a rank at most.
        gradient_bytes: bytes of the probe's gradient reduced over data parallel ranks, a rank at most.
        broadcast: bytes of the map's broadcast. per_step: bytes of the collective that every step carries.
        passes: of a probe. microbatches: that a rank runs in them.
        steps: their time in bf16 steps. seconds: their time.
        share: of the training time between two updates.
    """

    gathered: int
    column_bytes: int
    gradient_bytes: int
    broadcast: int
    per_step: int
    passes: int
    microbatches: int
    steps: float
    seconds: float
    share: float


def overhead(layout: Layout, probes: Probes, formats: int, bf16: StepTime, running: StepTime) -> Overhead:
    """An update of ``formats`` candidate formats, between steps that take as long as ``running``."""
    linears = layout.model.blocks * len(LINEAR_KINDS)
    reductions = 1 if probes.passes == 1 else 2
    each = probe_microbatches(layout, probes)
    ends = (layout.pp - 1) / layout.vpp
    seconds = probes.passes * (each + ends) / layout.microbatches * bf16.slowest
    shapes = layout.linear_shapes().values()
    columns = max(len(blocks) for blocks in layout.stages) * sum(s.n + s.k for s in shapes) * (1 + formats)
    parameters = max(layout.stage_parameters(stage) for stage in range(layout.pp))
    several = layout.dp > 1
    return Overhead(
        gathered=(reductions + 1) * table_entries(linears, formats) * _FLOAT64,
        column_bytes=columns * _FLOAT64 if several else 0,
        gradient_bytes=_FLOAT32 * parameters if several and reductions == 2 else 0,
        broadcast=1 + 3 * linears + _META_BYTES,
        per_step=_STEP_FIGURES * _FLOAT64,
        passes=probes.passes,
        microbatches=probes.passes * each,
        steps=seconds / bf16.total,
        seconds=seconds,
        share=seconds / (seconds + probes.interval * running.total),
    )


def table_entries(linears: int, formats: int) -> int:
    """Numbers in the statistics table that an all-reduce carries."""
    boundaries = 2 * (linears // len(LINEAR_KINDS)) + 1
    sinks = boundaries + 1  # the norms' weights and the word embedding
    each = len(LINEAR_COLUMNS) + len(FORMAT_COLUMNS) * formats + len(RHO_GRID) + _LAYOUT_COLUMNS
    return linears * each + boundaries * len(BOUNDARY_COLUMNS) + sinks * (len(RHO_GRID) + 1)


def probe_microbatches(layout: Layout, probes: Probes) -> int:
    """Microbatches a rank runs in one pass: an interleaved schedule needs whole groups of them."""
    wanted = min(probes.microbatches, layout.microbatches)
    if layout.vpp > 1:
        wanted = -(-wanted // layout.pp) * layout.pp
    return min(wanted, layout.microbatches)
