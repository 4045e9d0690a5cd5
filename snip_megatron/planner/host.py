"""Host time of a step: how long the CPU thread of a rank takes to launch kernels, and to capture CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from snip_megatron.planner.layout import Layout
from snip_megatron.precision import LINEAR_KINDS, Format
from snip_megatron.timing.cost_model import CostModel
from snip_megatron.timing.shapes import Formats
from snip_megatron.timing.table import Launching
from snip_megatron.timing.table_model import TimingModel

STATED_RECAPTURE = 0.05
"""Assumed seconds of capturing one layer and microbatch, if the table has no measurement.

A 1.1 B Llama of 22 layers with two microbatches a step took 1.9 to 2.6 s (``benchmarks/job_1b_h200_2026-11-22.json``,
the step that captures, less a usual one)."""

REMEDY = (
    "capture CUDA graphs (--cuda-graph-impl), use larger microbatches (--micro-batch-size), or fewer tensor parallel"
    " ranks"
)
_GEMMS_A_LAYER = 3 * len(LINEAR_KINDS)


class Host:
    """Predicts how long the host takes to launch the work of one layout.

    A microbatch of a stage takes the longer of the GPU's work and of its launching. Layers in CUDA graphs are launched
    in no time. Under a mixed map, each of the twelve GEMMs of a layer adds a twelfth of what its format adds to a layer
    of that format alone.

    Args:
        layout: the sizes.
        model: the cost model. Host seconds are known if its table holds them, or if the layers are in CUDA graphs.
    """

    def __init__(self, layout: Layout, model: CostModel) -> None:
        self._layout = layout
        table = model.table if isinstance(model, TimingModel) else None
        self._measured: Launching | None = None if table is None else table.launching
        self._of_table = table is not None
        self._recapture = None if table is None else table.recapture

    @property
    def graphs(self) -> bool:
        """Whether the layers are in CUDA graphs."""
        return self._layout.cuda_graph_impl != "none"

    @property
    def known(self) -> bool:
        """Whether host seconds are known, so that they are part of the prediction."""
        return self._measured is not None or self.graphs

    @property
    def step(self) -> float:
        """Seconds of launching the part of a step after the pipeline: the optimizer and other fixed parts."""
        return 0.0 if self._measured is None else self._measured.step

    def gemm(self, fmt: Format) -> float:
        """Return how many seconds longer a GEMM in ``fmt`` takes to launch than in bf16, over all microbatches."""
        if self._measured is None or self.graphs:
            return 0.0
        layer = self._measured.layer
        # A format that was not measured, nor its base, is assumed to take as long as the slowest measured one.
        added = layer.get(fmt, layer.get(fmt.base, max(layer.values()))) - layer[Format.BF16]
        return self._runs * self._layout.microbatches * added / _GEMMS_A_LAYER

    def bf16(self, stage: int) -> float:
        """Return the seconds of launching a stage in a step with all GEMMs in bf16."""
        layout = self._layout
        if self._measured is None or layout.cuda_graph_impl == "full_iteration":
            return 0.0
        layers = 0 if self.graphs else self._runs * len(layout.stages[stage])
        return layout.microbatches * (layers * self._measured.layer[Format.BF16] + self._measured.microbatch)

    def stage(self, stage: int, linears: Iterable[Formats]) -> float:
        """Return the seconds of launching a stage in a step.

        Args:
            stage: the pipeline stage.
            linears: the formats of its linears.
        """
        return self.bf16(stage) + sum(self.gemm(fmt) for formats in linears for fmt in formats)

    @property
    def _runs(self) -> float:
        """Launches of a layer relative to those without recomputation. The forward is about a third of these."""
        return 4 / 3 if self._layout.recompute == "full" else 1.0

    @property
    def recapture(self) -> float:
        """Seconds of capturing the CUDA graphs anew after an adoption, on the stage with most layers."""
        if not self.graphs:
            return 0.0
        rate = STATED_RECAPTURE if self._recapture is None else self._recapture
        return rate * self._layout.microbatches * max(len(blocks) for blocks in self._layout.stages)

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions behind the times, a sentence each."""
        if self.graphs:
            source = "stated" if self._recapture is None else "measured"
            rate = STATED_RECAPTURE if self._recapture is None else self._recapture
            return (
                f"host: layers in CUDA graphs are launched in no time; capturing them takes {1e3 * rate:.3g} ms a layer"
                f" and microbatch ({source})",
            )
        if self._measured is not None:
            return (
                f"host: launching as measured with {self._measured.layers.replace('_', ' ')} layers on one rank,"
                " without communication; a stage takes the longer of the GPU's work and of its launching",
            )
        why = "the table has no host seconds, which snip calibrate measures" if self._of_table else "no table"
        return (f"host: not modelled ({why}), as if the launching thread always kept up",)


def host_seconds(
    host: Host, stages: int, after: float, formats: Iterable[Format]
) -> tuple[dict[int, float], dict[str, float]]:
    """Return the launching seconds of a step: stage → seconds in bf16 plus ``after``; format → seconds a GEMM adds."""
    by_stage: Mapping[int, float] = {stage: host.bf16(stage) + after for stage in range(stages)}
    return dict(by_stage), {fmt.value: host.gemm(fmt) for fmt in formats}
