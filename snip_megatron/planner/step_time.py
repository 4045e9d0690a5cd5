"""Predicted seconds of a training step. The cost model predicts the linears, simple rules the rest (README.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import FormatsOf, packed_bytes
from snip_megatron.planner.rates import Links, Rates
from snip_megatron.planner.tensor_parallel import TensorParallel
from snip_megatron.precision import DENSE_LAYER, Format, Gemm
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.cost_model import ACCUMULATION, CostModel
from snip_megatron.timing.shapes import ALL_BF16, Formats, LinearShape

ASSUMPTIONS = (
    "step: the slowest stage's work times 1 + (pp − 1) / (vpp · microbatches), plus exposed gradient and parameter"
    " communication and the optimizer; data parallel ranks are equally fast",
    "tensor parallel communication: the forward's is exposed, and under sequence parallelism the gather of an output"
    " gradient; the rest of the backward's hides behind its GEMMs; pipeline sends are exposed unless the pipeline is"
    " virtual; exchanges whose bytes formats decide count to the time of linears",
    f"a kernel that adds gradients to main_grad has {ACCUMULATION:.0%} of a copy's bandwidth: it adds those of the"
    " embedding, and with --no-gradient-accumulation-fusion those of the layers that Megatron's own code runs",
    "data loading, logging and checkpoints take no time",
)

# Tensors that a block's element-wise kernels read and write in the forward and in the backward.
_NORM, _ADD, _ROPE, _SWIGLU = (2, 3), (3, 3), (2, 2), (3, 5)
_LOSS_BYTES = 52
"""Per logit, in Megatron's loss without ``--cross-entropy-loss-fusion``.

The forward makes an FP32 copy (6), finds the maximum (4), subtracts it in place (8), takes the exponential in place
(8), adds up (4) and divides in place (8). The backward scales in place (8) and rounds the gradient to bf16 (6).
"""
_EMBEDDING_BYTES = 10  # per feature of a token: read and written in bf16; gradient read in bf16 and added in FP32
_OPTIMIZER_BYTES = 46
"""Per parameter of a shard.

The norm reads the gradient (4), clipping scales it in place (8), Adam reads gradient, master weight and two moments
(16) and writes the latter three (12), and the master weight is copied to bf16 (6).
"""
_ZERO_BYTES = 4  # per parameter: the gradient buffer is cleared
_SCALE_BYTES = 8  # per parameter: gradients are divided by the number of data parallel ranks in place


@dataclass(frozen=True)
class StageTime:
    """Seconds that one GPU of a stage works in a step.

    Attributes:
        linears: decoder linears with their quantisation.
        attention: attention of the blocks.
        elementwise: element-wise kernels of the blocks.
        ends: embedding, output layer and loss.
        tensor_parallel: exposed tensor parallel communication.
        exchanges: the part of ``tensor_parallel`` that formats decide (``tensor_parallel.py``). It is 0 with
            communication in bf16.
        pipeline: exposed pipeline communication.
    """

    linears: float
    attention: float
    elementwise: float
    ends: float
    tensor_parallel: float
    exchanges: float
    pipeline: float

    @property
    def other(self) -> float:
        """Seconds outside the linears. They depend on formats only by ``exchanges``."""
        return math.fsum((self.attention, self.elementwise, self.ends, self.tensor_parallel, self.pipeline))

    @property
    def priced(self) -> float:
        """Seconds that formats decide, of the linears and of their exchanges: the time of a ``speedup=`` budget."""
        return self.linears + self.exchanges

    @property
    def total(self) -> float:
        """Seconds that the GPU works."""
        return self.linears + self.other


@dataclass(frozen=True)
class StepTime:
    """The time of a training step.

    Attributes:
        stages: work by stage.
        bubble: the pipeline's time divided by the slowest stage's work.
        data_parallel: seconds of exposed data parallel communication after the pipeline.
        optimizer: seconds of the optimizer.
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
        """The mean work of the stages divided by that of the slowest stage."""
        return math.fsum(stage.total for stage in self.stages) / len(self.stages) / self.slowest


class StepModel:
    """Predicts steps of one layout.

    Args:
        layout: the sizes.
        model: predicts the times of linears.
        links: bandwidths of the network; None for the default.
    """

    def __init__(self, layout: Layout, model: CostModel, links: Links | None = None) -> None:
        self.layout = layout
        self.model = model
        self.links = links or Links()
        self.rates = Rates(model)
        self.shapes: Mapping[str, LinearShape] = layout.linear_shapes()
        self.exchanges = TensorParallel(
            layout.tp,
            self.rates,
            self.links,
            communication=layout.communication,
            sequence_parallel=layout.sequence_parallel,
        )
        self._linears: dict[tuple[str, Formats], float] = {}

    # -- steps ---------------------------------------------------------------------------------------------------
    def step(self, formats_of: FormatsOf) -> StepTime:
        """Predict the step in which the linears run in the formats of ``formats_of``."""
        stages = tuple(self._stage(stage, formats_of) for stage in range(self.layout.pp))
        data_parallel, optimizer = self._after(max(stage.total for stage in stages))
        return StepTime(stages, self.layout.bubble, data_parallel, optimizer)

    def fixed_seconds(self) -> dict[int, float]:
        """Return stage → seconds of a step that no format changes, for the ``fixed_cost`` of a budget.

        Exchanges between tensor parallel ranks whose bytes formats decide are not among them (:meth:`option_times`),
        all other exchanges are. The time after the pipeline is divided by the factor of the bubble, so that the sum of
        the slowest stage times this factor is the step time.
        """
        bf16 = self.step(lambda block, kind: ALL_BF16)
        after = (bf16.data_parallel + bf16.optimizer) / bf16.bubble
        return {stage: time.other - time.exchanges + after for stage, time in enumerate(bf16.stages)}

    # -- one stage -----------------------------------------------------------------------------------------------
    def _stage(self, stage: int, formats_of: FormatsOf) -> StageTime:
        layout = self.layout
        blocks = layout.stages[stage]
        each = [(kind, formats_of(block, kind)) for block in blocks for kind in DENSE_LAYER]
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
            tensor_parallel=self._exchanged(self.exchanges.seconds, each) + count * self._heads(),
            exchanges=self._exchanged(self.exchanges.priced, each),
            pipeline=layout.microbatches * self._pipeline(stage),
        )

    def linear(self, kind: str, formats: Formats) -> float:
        """Return the seconds of one linear of a kind in a step."""
        key = (kind, formats)
        if key not in self._linears:
            self._linears[key] = self.model.linear_seconds(self.shapes[kind], formats)
        return self._linears[key]

    def option_times(self, formats: Iterable[Format]) -> OptionTimes:
        """Return the seconds that every GEMM is charged in a budget of time, those of its exchanges included."""
        return OptionTimes.predict(self.model, self.shapes, formats, self.exchanges.charge)

    def _exchanged(
        self, seconds: Callable[[str, LinearShape, Formats], float], linears: Sequence[tuple[str, Formats]]
    ) -> float:
        return self.layout.microbatches * math.fsum(seconds(kind, self.shapes[kind], fmt) for kind, fmt in linears)

    def _block_bytes(self) -> float:
        """Return the bytes that a block's element-wise kernels read and write in one microbatch."""
        layout, model = self.layout, self.layout.model
        runs = (2, 1) if layout.recompute == "full" else (1, 1)
        stream = layout.tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
        turned = layout.tokens * sum(layout.attention_features)
        gated = layout.tokens * model.ffn / layout.tp

        def passes(counts: tuple[int, int]) -> int:
            return counts[0] * runs[0] + counts[1] * runs[1]

        tensors = 2 * (passes(_NORM) + passes(_ADD)) * stream + passes(_ROPE) * turned + passes(_SWIGLU) * gated
        return 2.0 * tensors

    def _ends(self, stage: int) -> float:
        """Return the seconds of embedding, output layer and loss of one microbatch."""
        layout = self.layout
        features = layout.tokens * layout.model.hidden
        rows = layout.vocabulary // layout.tp
        added = self.rates.accumulation(rows * layout.model.hidden)
        seconds = 0.0
        if stage == 0:
            seconds += self.rates.memory(_EMBEDDING_BYTES * features) + added
        if stage == layout.pp - 1:
            seconds += 0.0 if layout.gradient_accumulation_fusion else added
            shape = LinearShape(layout.tokens, rows, layout.model.hidden)
            seconds += math.fsum(self.model.seconds(shape, gemm, Format.BF16) for gemm in Gemm)
            seconds += self.rates.memory(_LOSS_BYTES * layout.tokens * rows + 2 * sum(_NORM) * features)
        return seconds

    # -- communication -------------------------------------------------------------------------------------------
    def _heads(self) -> float:
        """Return the seconds of one microbatch in which a block's heads are gathered, and their gradient is summed.

        Megatron gathers Y of ``linear_qkv`` over all ranks if there are fewer key-value heads than ranks.
        """
        layout = self.layout
        if layout.model.groups >= layout.tp:
            return 0.0
        shape = self.shapes["self_attention.linear_qkv"]
        return self.exchanges.gathered_output(float(shape.tokens * shape.n * layout.tp), shape.forwards)

    def _pipeline(self, stage: int) -> float:
        """Return the seconds of one microbatch's sends to both neighbours."""
        layout = self.layout
        if layout.pp == 1 or layout.vpp > 1:
            return 0.0
        neighbours = (stage > 0) + (stage < layout.pp - 1)
        sent = 2.0 * layout.tokens * layout.model.hidden / (layout.tp if layout.sequence_parallel else 1)
        return neighbours * sent / self.links.of(2 * layout.tp * layout.dp)

    def _after(self, slowest: float) -> tuple[float, float]:
        """Return the seconds of exposed data parallel communication and of the optimizer, on the largest stage."""
        layout = self.layout
        parameters = max(layout.stage_parameters(stage) for stage in range(layout.pp))
        shards = layout.dp if layout.distributed_optimizer else 1
        whole = _ZERO_BYTES + (_SCALE_BYTES if layout.dp > 1 else 0)
        optimizer = self.rates.memory(_OPTIMIZER_BYTES * parameters / shards + whole * parameters)
        if layout.dp == 1:
            return 0.0, optimizer
        ring = (layout.dp - 1) / layout.dp / self.links.of(layout.tp * layout.dp)
        gradients = 4.0 * parameters * ring * (1 if layout.distributed_optimizer else 2)
        if layout.gradient_reduction != "fp32":
            each = packed_bytes(Format.FP8)
            moved = 4.0 + 2 * each + 8.0 / layout.dp  # quantised, and added to a part
            gradients = each * parameters * ring + self.rates.memory(moved * parameters)
        weights = 2.0 * parameters * ring if layout.distributed_optimizer else 0.0
        microbatch = slowest / layout.microbatches
        if layout.overlap_grad_reduce:
            gradients = max(0.0, gradients - 2 / 3 * microbatch)
        if layout.overlap_param_gather:
            weights = max(0.0, weights - 1 / 3 * microbatch)
        return gradients + weights, optimizer
