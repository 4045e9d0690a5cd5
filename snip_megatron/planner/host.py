"""Host time of a step: how long the CPU thread of a rank takes to launch kernels, and to capture CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from snip_megatron.planner.layout import Layout
from snip_megatron.precision import LINEAR_KINDS, Format
from snip_megatron.timing.cost_model import CostModel
from snip_megatron.timing.shapes import Formats
from snip_megatron.timing.table import Launching
from snip_megatron.timing.table_model import TimingModel

STATED_RECAPTURE = 0.03
"""Assumed seconds of capturing one layer and microbatch, if the table has no measurement.

The two adoptions of a 1.1 B Llama of 22 layers, of which Transformer Engine captures one microbatch, took 0.50 and
0.76 s (``benchmarks/results/jobs/job_1b-fp4_h200_2026-11-23.json``)."""

RESERVE = 1.5
"""Tensor parallel ranks, which wait for each other in every collective, need a host that launches faster than the GPU
works, because at any time one of the hosts may be slow. Under a reserve below this factor, their steps are likely to
wait. On two H200 (``job_8b-blocks-4k-tp2_2xh200_2026-11-25.json``) steps with 1.29 did, and steps with
1.64 did not."""

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
        found = None if table is None else table.launching_of(layout.tp)
        self._measured: Launching | None = None if found is None else found[1]
        self._ranks = 1 if found is None else found[0]
        self._of_table = table is not None
        measured = None if table is None else table.recapture
        self._capture, self._source = (STATED_RECAPTURE, "stated") if measured is None else (measured, "measured")

    @property
    def graphs(self) -> bool:
        """Whether the layers are in CUDA graphs."""
        return self._layout.cuda_graph_impl != "none"

    @property
    def known(self) -> bool:
        """Whether host seconds are known, so that they are part of the prediction."""
        return self._measured is not None or self.graphs

    @property
    def reserve(self) -> float:
        """The multiple of the launching seconds that the GPU's work must have so that it does not wait."""
        return RESERVE if self._ranks > 1 and not self.graphs else 1.0

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
    def _by_layer(self) -> bool:
        """Whether single layers can be captured anew, each with one graph for all microbatches."""
        return self._layout.cuda_graph_impl == "transformer_engine" and self._layout.pp == 1

    @property
    def recapture(self) -> tuple[float, float]:
        """The least and the most seconds of capturing CUDA graphs anew after an adoption.

        The most is for all layers of the stage with most layers. The least is for one layer, where single layers can
        be captured.
        """
        if not self.graphs:
            return 0.0, 0.0
        layers = max(len(blocks) for blocks in self._layout.stages)
        if self._by_layer:
            return self._capture, self._capture * layers
        return (self._capture * layers * self._layout.microbatches,) * 2

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions behind the times, a sentence each."""
        if self.graphs:
            captured = (
                "one microbatch is captured; the first map changes every layer; how many a later one changes is not"
                " known in advance, and the share of training counts all of them, as where memory is short"
                if self._by_layer
                else "every microbatch is captured"
            )
            return (
                "host: layers in CUDA graphs are launched in no time; capturing them takes"
                f" {1e3 * self._capture:.3g} ms a layer and microbatch ({self._source}); {captured}",
            )
        if self._measured is not None:
            several = self._layout.tp > 1
            how = f"over {self._ranks} tensor parallel ranks" if self._ranks > 1 else "on one rank"
            lacks = (
                ", without communication, so that it is too low (snip calibrate --add-to TABLE --ranks measures more)"
                if several and self._ranks == 1
                else ""
            )
            return (
                f"host: launching as measured with {self._measured.layers.replace('_', ' ')} layers {how}{lacks};"
                " a stage takes the longer of the GPU's work and of its launching",
            )
        why = "the table has no host seconds, which snip calibrate --add-to measures" if self._of_table else "no table"
        return (f"host: not modelled ({why}), as if the launching thread always kept up",)


def host_seconds(
    host: Host, stages: int, after: float, formats: Iterable[Format]
) -> tuple[dict[int, float], dict[str, float], float]:
    """Return the launching seconds of a step: stage → seconds in bf16 plus ``after``; format → seconds a GEMM adds.

    The last value is :attr:`Host.reserve`.
    """
    by_stage: Mapping[int, float] = {stage: host.bf16(stage) + after for stage in range(stages)}
    return dict(by_stage), {fmt.value: host.gemm(fmt) for fmt in formats}, host.reserve
