"""Seconds of a training step: decoder linears by the cost model, the rest by simple, stated rules (README.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import FormatsOf
from snip_megatron.planner.rates import Links, Rates
from snip_megatron.precision import LINEAR_KINDS, Format, Gemm
from snip_megatron.solver.costs import CostModel, Formats, LinearShape

ASSUMPTIONS = (
    "step: the slowest stage's work times 1 + (pp − 1) / (vpp · microbatches), plus exposed gradient and parameter"
    " communication and the optimizer; data parallel ranks are equally fast",
    "tensor parallel communication: the forward's is exposed, the backward's hides behind weight gradients; pipeline"
    " sends are exposed unless the pipeline is virtual",
    "the launching thread keeps up (see host seconds); data loading, logging and checkpoints take no time",
)

ALL_BF16: Formats = (Format.BF16,) * 3
# Tensors read and written by a block's element-wise kernels: forward, backward.
_NORM, _ADD, _ROPE, _SWIGLU = (2, 3), (3, 3), (2, 2), (3, 5)
_LOSS_BYTES = 20  # a logit: read bf16; FP32 written, read, written, read; bf16 gradient written
_EMBEDDING_BYTES = 10  # a feature of a token: read and written in bf16, its gradient read in bf16 and added in FP32
_OPTIMIZER_BYTES = 34  # a parameter: gradient and its norm, master, two moments read and written, bf16 weight written
_ZERO_BYTES = 4  # the gradient buffer is cleared
_HOST_BOUND = 3.0
"""A stage's work over ``host`` below which the host was seen to hold a step up: linears launched in a loop cost it less
than in a training step, which launches much besides (README.md, Known limitations)."""


@dataclass(frozen=True)
class StageTime:
    """Seconds that one GPU of a stage works in a step.

    Attributes:
        linears: decoder linears with their quantisation. attention, elementwise: of the blocks.
        ends: embedding, output layer and loss. tensor_parallel, pipeline: exposed communication.
        host: seconds that launching the linears keeps the thread busy (not part of the others).
    """

    linears: float
    attention: float
    elementwise: float
    ends: float
    tensor_parallel: float
    pipeline: float
    host: float = 0.0

    @property
    def other(self) -> float:
        """What no format changes."""
        return math.fsum((self.attention, self.elementwise, self.ends, self.tensor_parallel, self.pipeline))

    @property
    def total(self) -> float:
        """All of it."""
        return self.linears + self.other

    @property
    def host_bound(self) -> bool:
        """Whether the GPU is likely to wait for its host."""
        return self.total < _HOST_BOUND * self.host


@dataclass(frozen=True)
class StepTime:
    """A step.

    Attributes:
        stages: work by stage. bubble: step time over the slowest stage's work.
        data_parallel, optimizer: exposed seconds after the pipeline.
    """

    stages: tuple[StageTime, ...]
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage's work."""
        return max(stage.total for stage in self.stages)

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.bubble * self.slowest + self.data_parallel + self.optimizer

    @property
    def balance(self) -> float:
        """Mean work of the stages over the slowest's."""
        return math.fsum(stage.total for stage in self.stages) / len(self.stages) / self.slowest


class StepModel:
    """Predicts steps of one layout.

    Args:
        layout: sizes. model: times of linears. links: bandwidths.
    """

    def __init__(self, layout: Layout, model: CostModel, links: Links | None = None) -> None:
        self.layout = layout
        self.model = model
        self.links = links or Links()
        self.rates = Rates(model)
        self.shapes: Mapping[str, LinearShape] = layout.linear_shapes()
        self._linears: dict[tuple[str, Formats], float] = {}

    # -- steps ---------------------------------------------------------------------------------------------------
    def step(self, formats_of: FormatsOf) -> StepTime:
        """The step when every linear runs in its formats."""
        stages = tuple(self._stage(stage, formats_of) for stage in range(self.layout.pp))
        data_parallel, optimizer = self._after(max(stage.total for stage in stages))
        return StepTime(stages, self.layout.bubble, data_parallel, optimizer)

    def fixed_seconds(self) -> dict[int, float]:
        """Stage → seconds a step that no choice changes, in the scale of the linears' seconds: the ``fixed_cost`` of a
        budget of kind ``speedup`` or ``loss``. Time after the pipeline is divided by the bubble's factor, so that the
        slowest stage's sum times that factor is the step."""
        bf16 = self.step(lambda block, kind: ALL_BF16)
        after = (bf16.data_parallel + bf16.optimizer) / bf16.bubble
        return {stage: time.other + after for stage, time in enumerate(bf16.stages)}

    # -- one stage -----------------------------------------------------------------------------------------------
    def _stage(self, stage: int, formats_of: FormatsOf) -> StageTime:
        layout = self.layout
        blocks = layout.stages[stage]
        each = [(kind, formats_of(block, kind)) for block in blocks for kind in LINEAR_KINDS]
        count = layout.microbatches * len(blocks)
        forward, backward = self.rates.attention(
            layout.seq_length, layout.model.heads // layout.tp, layout.model.head_size, layout.micro_batch_size
        )
        again = 0 if layout.recompute == "none" else 1
        return StageTime(
            linears=math.fsum(self.linear(kind, formats) for kind, formats in each),
            attention=count * ((1 + again) * forward + backward),
            elementwise=count * self.rates.memory(self._block_bytes()),
            ends=layout.microbatches * self._ends(stage),
            tensor_parallel=count * self._tensor_parallel(),
            pipeline=layout.microbatches * self._pipeline(stage),
            host=layout.microbatches * math.fsum(self._host(formats) for _, formats in each),
        )

    def linear(self, kind: str, formats: Formats) -> float:
        """Seconds a step of one linear of that kind."""
        key = (kind, formats)
        if key not in self._linears:
            self._linears[key] = self.model.linear_seconds(self.shapes[kind], formats)
        return self._linears[key]

    def _block_bytes(self) -> float:
        """Bytes that a block's element-wise kernels read and write in one microbatch."""
        layout, model = self.layout, self.layout.model
        runs = (2, 1) if layout.recompute == "full" else (1, 1)
        stream = layout.tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
        turned = layout.tokens * (model.heads + model.groups) * model.head_size / layout.tp
        gated = layout.tokens * model.ffn / layout.tp

        def passes(counts: tuple[int, int]) -> int:
            return counts[0] * runs[0] + counts[1] * runs[1]

        tensors = 2 * (passes(_NORM) + passes(_ADD)) * stream + passes(_ROPE) * turned + passes(_SWIGLU) * gated
        return 2.0 * tensors

    def _ends(self, stage: int) -> float:
        """Embedding, output layer and loss of one microbatch."""
        layout = self.layout
        features = layout.tokens * layout.model.hidden
        seconds = self.rates.memory(_EMBEDDING_BYTES * features) if stage == 0 else 0.0
        if stage == layout.pp - 1:
            rows = layout.vocabulary // layout.tp
            shape = LinearShape(layout.tokens, rows, layout.model.hidden)
            seconds += math.fsum(self.model.seconds(shape, gemm, Format.BF16) for gemm in Gemm)
            seconds += self.rates.memory(_LOSS_BYTES * layout.tokens * rows + 2 * sum(_NORM) * features)
        return seconds

    def _host(self, formats: Formats) -> float:
        host = getattr(self.model, "host_seconds", None)
        return 0.0 if host is None else float(host(formats))

    # -- communication -------------------------------------------------------------------------------------------
    def _tensor_parallel(self) -> float:
        """Of one block's forward in one microbatch: two reductions (or a gather and a scatter each) of the stream."""
        layout = self.layout
        if layout.tp == 1:
            return 0.0
        sent = 2 * (layout.tp - 1) / layout.tp * 2.0 * layout.tokens * layout.model.hidden
        runs = 2 if layout.recompute == "full" else 1
        return runs * 2 * sent / self.links.of(layout.tp)

    def _pipeline(self, stage: int) -> float:
        """Sends of one microbatch to both neighbours."""
        layout = self.layout
        if layout.pp == 1 or layout.vpp > 1:
            return 0.0
        neighbours = (stage > 0) + (stage < layout.pp - 1)
        sent = 2.0 * layout.tokens * layout.model.hidden / (layout.tp if layout.sequence_parallel else 1)
        return neighbours * sent / self.links.of(2 * layout.tp * layout.dp)

    def _after(self, slowest: float) -> tuple[float, float]:
        """Exposed data parallel communication and the optimizer, of the stage with most parameters."""
        layout = self.layout
        parameters = max(layout.stage_parameters(stage) for stage in range(layout.pp))
        shards = layout.dp if layout.distributed_optimizer else 1
        optimizer = self.rates.memory(_OPTIMIZER_BYTES * parameters / shards + _ZERO_BYTES * parameters)
        if layout.dp == 1:
            return 0.0, optimizer
        ring = (layout.dp - 1) / layout.dp / self.links.of(layout.tp * layout.dp)
        gradients = 4.0 * parameters * ring * (1 if layout.distributed_optimizer else 2)
        weights = 2.0 * parameters * ring if layout.distributed_optimizer else 0.0
        microbatch = slowest / layout.microbatches
        if layout.overlap_grad_reduce:
            gradients = max(0.0, gradients - 2 / 3 * microbatch)
        if layout.overlap_param_gather:
            weights = max(0.0, weights - 1 / 3 * microbatch)
        return gradients + weights, optimizer
