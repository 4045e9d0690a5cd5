"""The overhead of SNIP: passes that an update runs, its seconds, and its share of training time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from snip_megatron.config import SnipConfig
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.probes import calls, microbatches_by_kind, weighs_updates
from snip_megatron.planner.rates import Links
from snip_megatron.planner.step_time import StepTime

ASSUMPTIONS = (
    "probes: each pass is a bf16 forward and backward of a microbatch, each call fills the pipeline once; what"
    " recording adds to the statistics pass is not modelled; gradients go over data parallel ranks exposed",
)

STATED_RECAPTURE = 0.03
"""Assumed seconds of capturing one layer and microbatch in CUDA graphs, if the table has no measurement.

The two adoptions of a 1.1 B Llama of 22 layers, of which Transformer Engine captures one microbatch, took 0.50 and
0.76 s (``job_1b-fp4_h200_2026-11-23.json``)."""

_FLOAT32 = 4


@dataclass(frozen=True)
class Overhead:
    """The overhead of one update.

    Attributes:
        passes: calls of the pipeline schedule.
        microbatches: microbatches that a rank runs in these calls.
        by_kind: kind of ``probe`` event → microbatches that a rank runs for it.
        steps: duration, in bf16 steps.
        seconds: duration in seconds.
        reducing_seconds: the part of ``seconds`` in which probe gradients are reduced over data parallel ranks.
        recapture_seconds: capturing the CUDA graphs of all layers anew at the adoption of a map; 0 without graphs.
        least_recapture_seconds: the least that the adoption of a later map takes: where only the layers that change are
            captured, that of one layer.
        share: the share of the update and of ``recapture_seconds`` in the training time from one update to the next.
    """

    passes: int
    microbatches: int
    by_kind: Mapping[str, int]
    steps: float
    seconds: float
    reducing_seconds: float
    recapture_seconds: float
    least_recapture_seconds: float
    share: float


def overhead(
    layout: Layout,
    config: SnipConfig,
    bf16: StepTime,
    running: StepTime,
    links: Links | None = None,
    recapture: tuple[float, float] = (0.0, 0.0),
) -> Overhead:
    """Predict the overhead of an update.

    Args:
        layout: the sizes.
        config: the configuration of the training.
        bf16: the time of a bf16 step.
        running: the time of a step between updates.
        links: bandwidths of the network; None for the default.
        recapture: the least and the most seconds of capturing CUDA graphs anew at an adoption.
    """
    made = calls(layout, config)
    ends = (layout.pp - 1) / layout.vpp
    passing = sum(call.microbatches + ends for call in made) / layout.microbatches * bf16.slowest
    parameters = max(layout.probed_parameters(stage) for stage in range(layout.pp))
    reduced = _FLOAT32 * parameters if layout.dp > 1 and weighs_updates(config) else 0
    reducing = 2.0 * (layout.dp - 1) / layout.dp * reduced / (links or Links()).of(layout.tp * layout.dp)
    seconds = passing + reducing
    least, most = recapture if made else (0.0, 0.0)
    lost = seconds + most
    return Overhead(
        passes=len(made),
        microbatches=sum(call.microbatches for call in made),
        by_kind=microbatches_by_kind(made),
        steps=seconds / bf16.total,
        seconds=seconds,
        reducing_seconds=reducing,
        recapture_seconds=most,
        least_recapture_seconds=least,
        share=lost / (lost + config.update_interval * running.total),
    )


def recapture(layout: Layout, measured: float | None) -> tuple[float, float]:
    """Return the least and the most seconds of capturing CUDA graphs anew after an adoption; 0 without graphs.

    The most is for all layers of the stage with most layers. The least is for one layer, where single layers can be
    captured, each with one graph for all microbatches.

    Args:
        layout: the sizes.
        measured: seconds of a layer and captured microbatch; None for :data:`STATED_RECAPTURE`.
    """
    if layout.cuda_graph_impl == "none":
        return 0.0, 0.0
    layer = STATED_RECAPTURE if measured is None else measured
    layers = max(len(blocks) for blocks in layout.stages)
    if layout.cuda_graph_impl == "transformer_engine" and layout.pp == 1:
        return layer, layer * layers
    return (layer * layers * layout.microbatches,) * 2
