"""Predicted seconds of a training step. The cost model predicts the linears, simple rules predict the rest."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import FormatsOf, after_attention
from snip_megatron.precision import ALL_BF16, Format, Formats, Gemm, LinearRow, Role, Side
from snip_megatron.runtime.config import backend_of
from snip_megatron.sensitivity.times import OptionTimes, seconds_of
from snip_megatron.timing.cost_model import (
    ACCUMULATION,
    FLOPS_RATE,
    STATED_COPY,
    CostModel,
    LinearShape,
    LogGrid,
    accumulation_seconds,
)

ASSUMPTIONS = (
    "step: the slowest stage's work times 1 + (pp − 1) / (vpp · microbatches), plus exposed gradient and parameter"
    " communication and the optimizer; data parallel ranks are equally fast",
    "tensor parallel communication: the forward's is exposed, and under sequence parallelism the gather of an output"
    " gradient; the rest of the backward's hides behind its GEMMs; pipeline sends are exposed unless the pipeline is"
    " virtual; what --snip-gradient-reduction quantises takes as long as in FP32",
    "tokens are spread evenly over experts, dispatch and combination are exposed; experts of three bf16 GEMMs are"
    " launched one by one, by Transformer Engine, if the table has its times, else at once; exchanges of context"
    " parallel ranks, routers and scans take no time",
    f"a kernel that adds gradients to main_grad has {ACCUMULATION:.0%} of a copy's bandwidth: it adds those of the"
    " embedding, and with --no-gradient-accumulation-fusion those of the layers that Megatron's own code runs",
    "on Hopper SwiGLU is computed with the quantisation of its result, which spares one read (--snip-fusions auto)",
    "data loading, logging and checkpoints take no time",
)

# Tensors that element-wise kernels read and write in the forward and in the backward.
_FUSED = {Format.FP8, Format.FP4, Format.FP8_TENSOR}
_NORM, _ADD, _ROPE = (2, 3), (3, 3), (2, 2)
_LOSS_BYTES = 52
"""Per logit, in Megatron's loss without ``--cross-entropy-loss-fusion``.

The forward copies to FP32 (6), finds the maximum (4), subtracts (8), exponentiates (8), adds up (4) and divides (8).
The backward scales (8) and rounds to bf16 (6).
"""
_EMBEDDING_BYTES = 10  # per feature of a token: read and written in bf16; gradient read in bf16 and added in FP32
_OPTIMIZER_BYTES = 46
"""Per parameter of a shard: the norm (4), clipping (8), Adam's reads (16) and writes (12), the copy to bf16 (6)."""
_ZERO_BYTES = 4  # per parameter: the gradient buffer is cleared
_SCALE_BYTES = 8  # per parameter: gradients are divided by the number of data parallel ranks in place
STATED_ATTENTION = 0.45
"""Assumed rate of causal attention as a share of the bf16 rate, if the table has no measurement."""
ELEMENTWISE = 0.75
"""Bandwidth of norms, SwiGLU, RoPE and additions as a share of a copy's."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward divided by those of its forward."""


@dataclass(frozen=True)
class Links:
    """Achieved bandwidths of the network: bytes a second that one GPU sends ``within`` a node, or ``between`` nodes.

    The defaults are those of H200s. Two of them gathered 16 MiB at 136 to 197 GB/s each, and 64 MiB at 226 to 264. The
    default within a node was chosen so that trainings under tensor parallelism on two of them are predicted within 7 %.
    """

    node_size: int = 8
    within: float = 180e9
    between: float = 40e9

    def of(self, ranks: int) -> float:
        """Return the bandwidth of a group that spans ``ranks`` consecutive GPUs."""
        return self.within if ranks <= self.node_size else self.between


def _attention_flops(sequence: int, heads: int, head_size: int) -> float:
    """Return the FLOPs of the forward of one sequence: two GEMMs, of which half is masked."""
    return 2.0 * math.prod((sequence, sequence, heads, head_size))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step."""

    # those that one GPU of each stage works: of the ``linears`` with their quantisation, ``attention``, ``elementwise``
    # kernels of the layers, ``ends`` (embedding, output layer and loss), exposed communication of ``tensor_parallel``
    # ranks, ``experts`` and ``pipeline``, ``stock``, what Megatron's own experts take longer than SNIP's in bf16, and
    # their sum ``total``
    stages: tuple[dict[str, float], ...]
    bubble: float  # the pipeline's time divided by the slowest stage's work
    data_parallel: float  # exposed communication after the pipeline
    optimizer: float

    @property
    def slowest(self) -> float:
        return max(stage["total"] for stage in self.stages)

    @property
    def linears(self) -> float:
        """Seconds of the linears on the stage that takes longest for them: what a ``speedup=`` budget bounds."""
        return max(stage["linears"] for stage in self.stages)

    @property
    def total(self) -> float:
        return self.bubble * self.slowest + self.data_parallel + self.optimizer

    @property
    def balance(self) -> float:
        """The mean work of the stages divided by that of the slowest stage."""
        return math.fsum(stage["total"] for stage in self.stages) / len(self.stages) / self.slowest


@dataclass(eq=False)
class StepModel:
    """Predicts the steps of one layout, with the linears' times of ``model`` and the bandwidths of ``links``.

    ``gpu_memory`` are the bytes of a GPU's memory. It is None if no table has them.
    """

    layout: Layout
    model: CostModel
    links: Links = Links()

    def __post_init__(self) -> None:
        table = self.model.table
        self.gpu_memory = None if table is None else table.memory
        self._measured_copy = None if table is None else table.copy_rate
        self._copy = self._measured_copy or STATED_COPY
        attention = {} if table is None else table.attention
        self._attention_times = LogGrid(attention, lambda size: _attention_flops(*size)) if attention else None
        self._fuses = self.layout.fused_swiglu and backend_of(self.model) == "hopper"
        self._gemm_seconds = cache(self.model.seconds)

    # -- steps ---------------------------------------------------------------------------------------------------
    def step(self, formats_of: FormatsOf) -> StepTime:
        """Predict the step in which the linears run in the formats of ``formats_of``."""
        stages = tuple(self._stage(stage, formats_of) for stage in range(self.layout.pp))
        data_parallel, optimizer = self._after(max(stage["total"] for stage in stages))
        return StepTime(stages, self.layout.bubble, data_parallel, optimizer)

    def fixed_seconds(self) -> dict[int, float]:
        """Return stage → seconds of a step that no format changes, its share of what follows the pipeline included."""
        bf16 = self.step(lambda row: ALL_BF16)
        after = (bf16.data_parallel + bf16.optimizer) / bf16.bubble
        fixed = (seconds["total"] - seconds["linears"] - seconds["stock"] + after for seconds in bf16.stages)
        return dict(enumerate(fixed))

    def linear(self, row: LinearRow, formats: Formats) -> float:
        """Return the seconds of a linear in a step, as a budget of time adds them up (:meth:`option_times`)."""
        by_gemm, shape = dict(zip(Gemm, formats, strict=True)), self.layout.shapes[row.name]
        return seconds_of(by_gemm, partial(self._gemm_seconds, shape), partial(self.model.joint, shape))

    def option_times(self, formats: Iterable[Format]) -> OptionTimes:
        """Return the seconds that every GEMM is charged in a budget of time."""
        shapes = {kind: self.layout.shapes[row.name] for kind, row in self.layout.kinds.items()}
        return OptionTimes.predict(self.model, shapes, formats)

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions behind the times of everything except the linears, a sentence each."""
        stated, links = f"stated at {STATED_ATTENTION * FLOPS_RATE / 1e12:.0f} TFLOP/s", self.links
        attention = stated if self._attention_times is None else "as torch's fused kernel was measured"
        copy = "stated" if self._measured_copy is None else "measured"
        return (
            f"attention: causal, backward {ATTENTION_BACKWARD:g} × the forward's FLOPs, {attention}",
            f"norms, RoPE, SwiGLU, additions, embedding, loss, optimizer: bytes moved at {ELEMENTWISE:.0%} of a copy's"
            f" {self._copy / 1e12:.2f} TB/s ({copy})",
            f"links (stated), a GPU: {links.within / 1e9:g} GB/s within a node of {links.node_size},"
            f" {links.between / 1e9:g} GB/s between nodes",
            *ASSUMPTIONS,
        )

    # -- one stage -----------------------------------------------------------------------------------------------
    def _stage(self, stage: int, formats_of: FormatsOf) -> dict[str, float]:
        layout = self.layout
        linears = [(row, formats_of(row)) for layer in layout.stages[stage] for row in layer]
        shapes = [(row, formats, layout.shapes[row.name]) for row, formats in linears]
        attentions = sum(layout.passes(row) for row, _ in linears if after_attention(row))
        moved = self._layer_bytes([row for row, _ in linears]) - math.fsum(
            self._spared_bytes(*each) for each in linears
        )
        microbatch = {
            "attention": attentions * self._attention(),
            "elementwise": self._memory(moved),
            "ends": self._ends(stage),
            "experts": math.fsum(self._dispatch(row) for row, _ in linears),
            "pipeline": self._pipeline(stage),
        }
        seconds = {name: layout.microbatches * value for name, value in microbatch.items()} | {
            "linears": math.fsum(self.linear(row, formats) for row, formats in linears),
            "tensor_parallel": math.fsum(shape.microbatches * self._exchanged(row) for row, _, shape in shapes),
            "stock": math.fsum(self.model.stock(shape) for _, formats, shape in shapes if formats == ALL_BF16),
        }
        return seconds | {"total": math.fsum(seconds.values())}

    def _attention(self) -> float:
        """Return the seconds of an attention in one microbatch."""
        layout, model, grid = self.layout, self.layout.model, self._attention_times
        size = (layout.seq_length, model.heads // layout.tp, model.head_size)
        if grid is None:
            forward = _attention_flops(*size) / (STATED_ATTENTION * FLOPS_RATE)
            backward = ATTENTION_BACKWARD * forward
        else:
            forward, backward = grid.seconds(size, lambda row: row[0]), grid.seconds(size, lambda row: row[1])
        again = 0 if layout.recompute == "none" else 1
        return layout.micro_batch_size * ((1 + again) * forward + backward) / layout.cp

    def _memory(self, moved: float) -> float:
        """Return the seconds of element-wise kernels that read and write ``moved`` bytes."""
        return moved / (self._copy * ELEMENTWISE)

    def _layer_bytes(self, rows: Iterable[LinearRow]) -> float:
        """Return the bytes that element-wise kernels read and write in one microbatch.

        A norm begins each sub-block and an addition ends it; attention rotates queries and keys. Elsewhere an
        activation makes the X of the linear that ends a branch from the Y of the one that begins it.
        """
        layout, model = self.layout, self.layout.model
        heads = layout.tokens * model.head_size * (model.heads // layout.tp + max(1, model.groups // layout.tp))
        blocks: set[int] = set()
        elements = 0.0
        for row in rows:
            shape = layout.shapes[row.name]
            tokens = shape.tokens * layout.passes(row)
            if row.sub_block not in blocks:
                blocks.add(row.sub_block)
                elements += sum(_passes(each, shape.forwards) * layout.stream for each in (_NORM, _ADD))
            if after_attention(row):
                elements += _passes(_ROPE, shape.forwards) * heads
            elif row.role is Role.WRITES:
                elements += _passes((1, 1), shape.forwards) * tokens * shape.k
            elif row.role is Role.READS and "attention" not in row.id.path:
                elements += _passes((1, 2), shape.forwards) * tokens * shape.n
        return 2.0 * elements

    def _spared_bytes(self, row: LinearRow, formats: Formats) -> float:
        """Return the bytes that SwiGLU fused with the quantisation of X of fc2, or of G of fc1, does not move."""
        shape, reads = self.layout.shapes[row.name], row.role is Role.READS
        of_operand = {*(formats[1:] if reads else formats[::2])}
        if not self._fuses or not row.id.path.startswith("mlp.linear_fc") or not of_operand <= _FUSED:
            return 0.0
        return 2.0 * shape.tokens * (shape.n if reads else shape.k * shape.forwards)

    def _ends(self, stage: int) -> float:
        """Return the seconds of embedding, output layer and loss of one microbatch."""
        layout = self.layout
        features = layout.tokens * layout.model.hidden
        rows = layout.vocabulary // layout.tp
        added = accumulation_seconds(rows * layout.model.hidden, self._measured_copy)
        seconds = 0.0
        if stage == 0:
            seconds += self._memory(_EMBEDDING_BYTES * features) + added
        if stage == layout.pp - 1:
            shape = LinearShape(layout.tokens, rows, layout.model.hidden)
            loss = math.fsum(self.model.seconds(shape, gemm, Format.BF16) for gemm in Gemm)
            loss += 0.0 if layout.gradient_accumulation_fusion else added
            loss += self._memory(_LOSS_BYTES * layout.tokens * rows + 2 * sum(_NORM) * features)
            seconds += layout.model.predictions * loss
        return seconds

    # -- communication -------------------------------------------------------------------------------------------
    def _exchanged(self, row: LinearRow) -> float:
        """Return the exposed seconds of one microbatch in which tensor parallel ranks exchange a linear's X, Y and G.

        They exchange the matrix whose features are not split. Gathers for weight gradients and sums of ∂L/∂X overlap
        with GEMMs. The dispatcher exchanges what linears of experts need.
        """
        layout, shape = self.layout, self.layout.shapes[row.name]
        if layout.tp == 1 or row.experts > 1 or row.sharded is Side.NEITHER:
            return 0.0
        column = row.sharded is Side.OUTPUT
        share = 2.0 * shape.tokens * (shape.k if column else shape.n) * (layout.tp - 1) / layout.tp
        sent = share / self.links.of(layout.tp)
        if not layout.sequence_parallel:  # an all-reduce of Y
            return 0.0 if column else 2 * shape.forwards * sent
        return shape.forwards * sent if column else (1 + shape.forwards) * sent

    def _dispatch(self, row: LinearRow) -> float:
        """Return the seconds of one microbatch in which tokens and their gradients go to the experts and back."""
        layout = self.layout
        if layout.ep == 1 or row.experts == 1 or row.sharded is not Side.INPUT:  # once for fc1 and fc2
            return 0.0
        features = layout.stream * row.n / layout.model.hidden  # fewer behind a latent projection
        sent = 2.0 * features * row.active * (layout.ep - 1) / layout.ep
        return 4 * sent / self.links.of(layout.tp * layout.cp * layout.ep)

    def _pipeline(self, stage: int) -> float:
        """Return the seconds of one microbatch's sends to both neighbours."""
        layout = self.layout
        if layout.pp == 1 or layout.vpp > 1:
            return 0.0
        neighbours = (stage > 0) + (stage < layout.pp - 1)
        return neighbours * 2.0 * layout.stream / self.links.of(2 * layout.tp * layout.cp * layout.dp)

    def _after(self, slowest: float) -> tuple[float, float]:
        """Return the seconds of exposed data parallel communication and of the optimizer, on the largest stage."""
        layout = self.layout
        parameters, ranks = max(map(layout.stage_parameters, range(layout.pp))), layout.dp * layout.cp
        shards = ranks if layout.distributed_optimizer else 1
        whole = _ZERO_BYTES + (_SCALE_BYTES if ranks > 1 else 0)
        optimizer = self._memory(_OPTIMIZER_BYTES * parameters / shards + whole * parameters)
        if ranks == 1:
            return 0.0, optimizer
        ring = (ranks - 1) / ranks / self.links.of(layout.tp * ranks)
        gradients = layout.gradient_bytes * parameters * ring * (1 if layout.distributed_optimizer else 2)
        weights = 2.0 * parameters * ring if layout.distributed_optimizer else 0.0
        microbatch = slowest / layout.microbatches
        if layout.overlap_grad_reduce:
            gradients = max(0.0, gradients - 2 / 3 * microbatch)
        if layout.overlap_param_gather:
            weights = max(0.0, weights - 1 / 3 * microbatch)
        return gradients + weights, optimizer


def _passes(counts: tuple[int, int], forwards: int) -> int:
    """Return how often tensors are read and written in so many forwards and one backward."""
    return forwards * counts[0] + counts[1]
