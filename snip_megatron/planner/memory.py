"""Bytes on one GPU of each pipeline stage: parameters, what is kept for the backward in each format, probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.probes import Probes, forced_passes, probe_microbatches
from snip_megatron.precision import LINEAR_KINDS, Format
from snip_megatron.solver.costs import Formats, LinearShape
from snip_megatron.statistics.probe_memory import LinearRows, ProbedShapes

FormatsOf = Callable[[int, str], Formats]
"""(block, kind of linear) → formats."""

ASSUMPTIONS = (
    "memory: bf16 weights, FP32 gradients, FP32 master weights and two Adam moments (sharded by the distributed"
    " optimizer); fused attention that keeps q, k, v, its output and one number a row; bf16 logits, FP32 softmax, bf16"
    " gradient; the backward's largest temporary is the gradient of the MLP's first linear; no fragmentation, NCCL"
    " buffers or CUDA context",
)

_WEIGHT, _GRADIENT, _OPTIMIZER = 2, 4, 12
_LOGIT = 8  # bf16 logit, FP32 softmax, bf16 gradient
_TILE, _BLOCK = 128, 128 * 128
_STORED = (Format.FP8, Format.FP4, Format.FP8_TENSOR)
"""Formats with kernels of their own; the others keep bf16 operands and are quantised in the GEMM."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each GPU of a stage.

    Attributes:
        parameters, gradients, optimizer: bf16 weights, FP32 gradients, master weights and moments.
        quantised_weights: kept from a step's first microbatch to its end.
        activations: kept for the backward at the schedule's peak.
        logits: of the last stage. working: temporaries of the backward.
        probe: what a probe has instead of activations, quantised weights and working memory.
        probe_copies: the part of it that is a copy of the gradients (estimator measured) or weights (policy hawq).
    """

    parameters: float
    gradients: float
    optimizer: float
    quantised_weights: float
    activations: float
    logits: float
    working: float
    probe: float
    probe_copies: float

    @property
    def fixed(self) -> float:
        """What is there all the time."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def training(self) -> float:
        """The peak of a training step."""
        return self.fixed + self.quantised_weights + self.activations + self.logits + self.working

    @property
    def probing(self) -> float:
        """The peak of a probe."""
        return self.fixed + self.probe + self.logits + self.working

    @property
    def peak(self) -> float:
        """The larger of the two."""
        return max(self.training, self.probing)


def stage_memory(
    layout: Layout, stage: int, formats_of: FormatsOf, probes: Probes | None = None, candidates: Sequence[str] = ()
) -> StageMemory:
    """Memory of a stage whose linears run in given formats, and of what an update measures: ``candidates``."""
    parameters = layout.stage_parameters(stage)
    shards = layout.dp if layout.distributed_optimizer else 1
    shapes = layout.linear_shapes()
    blocks = layout.stages[stage]
    kept = sum(block_activations(layout, _row(formats_of, block)) for block in blocks)
    if layout.recompute == "full":
        working_block = max(_kept_without_recompute(layout, _row(formats_of, block)) for block in blocks)
    else:
        working_block = 0.0
    weights = sum(quantised_weight(shapes[kind], formats_of(block, kind)) for block in blocks for kind in LINEAR_KINDS)
    return StageMemory(
        parameters=float(_WEIGHT * parameters),
        gradients=float(_GRADIENT * parameters),
        optimizer=_OPTIMIZER * parameters / shards,
        quantised_weights=weights,
        activations=kept * layout.in_flight(stage),
        logits=_LOGIT * layout.tokens * layout.vocabulary / layout.tp if stage == layout.pp - 1 else 0.0,
        working=working_block + 2.0 * layout.tokens * 2 * layout.model.ffn / layout.tp,
        **_probe(layout, stage, probes, candidates),
    )


def block_activations(layout: Layout, formats: Mapping[str, Formats]) -> float:
    """Bytes that one block keeps of one microbatch for its backward."""
    if layout.recompute == "full":
        return 2.0 * layout.tokens * layout.model.hidden / _stream_shards(layout)
    return _kept_without_recompute(layout, formats)


def _kept_without_recompute(layout: Layout, formats: Mapping[str, Formats]) -> float:
    model, tokens, tp = layout.model, layout.tokens, layout.tp
    queries = tokens * model.heads * model.head_size / tp
    norms = 2 * 2.0 * tokens * model.hidden / _stream_shards(layout)
    heads = 2.0 * tokens * model.linears["self_attention.linear_qkv"][0] / tp
    output = 0.0 if layout.recompute == "selective" else 2.0 * queries + 4.0 * tokens * model.heads / tp
    swiglu = 2.0 * tokens * 2 * model.ffn / tp
    return norms + heads + output + swiglu + sum(saved_input(layout, kind, formats[kind]) for kind in LINEAR_KINDS)


def saved_input(layout: Layout, kind: str, formats: Formats) -> float:
    """Bytes of X that a linear keeps of one microbatch beside what others keep anyway.

    wgrad's operand, E4M3 and FP32 scales a tile. Under sequence parallelism the bf16 shard of a gathered X. In bf16 the
    attention's output, which it keeps itself, costs ``linear_proj`` nothing.
    """
    shape = layout.linear_shapes()[kind]
    if shape.gathered:
        return 2.0 * layout.tokens * shape.k / layout.tp
    elements = float(layout.tokens * shape.k)
    wgrad = formats[2]
    if wgrad not in _STORED:
        shared = kind == "self_attention.linear_proj" and layout.recompute != "selective"
        return 0.0 if shared else 2.0 * elements
    return elements * (1.0 if wgrad is Format.FP8_TENSOR else 1.0 + 4.0 / _TILE)


def quantised_weight(shape: LinearShape, formats: Formats) -> float:
    """Bytes of W as fprop and as dgrad take it."""
    sides = [fmt for fmt in formats[:2] if fmt in _STORED]
    each = [1.0 if fmt is Format.FP8_TENSOR else 1.0 + 4.0 / _BLOCK for fmt in sides]
    return float(shape.n * shape.k) * sum(each)


def _probe(layout: Layout, stage: int, probes: Probes | None, candidates: Sequence[str]) -> dict[str, float]:
    """The largest of an update's passes: bf16 activations, rows sampled by the statistics pass and kept to the end,
    copies, and temporaries of one linear, or of one parameter whose drift is evaluated."""
    if probes is None or not probes.updates:
        return {"probe": 0.0, "probe_copies": 0.0}
    each = probe_microbatches(layout, probes)
    own = _probed_shapes(layout, stage)
    peak, copies = _bf16_activations(layout, stage, each) + own.recording, 0.0
    if probes.hessian:
        copies = own.weight_copy
        peak = max(peak, copies + _bf16_activations(layout, stage, each) + own.moving)
    if probes.forces:
        copies = own.gradient_copy
        activations = _bf16_activations(layout, stage, forced_passes(layout, probes, candidates))
        peak = max(peak, copies + activations + own.evaluating)
    return {"probe": own.samples(probes.tokens, each) + peak, "probe_copies": copies}


def _probed_shapes(layout: Layout, stage: int) -> ProbedShapes:
    linears = [LinearRows(layout.tokens, shape.n, shape.k) for shape in layout.linear_shapes().values()]
    blocks = len(layout.stages[stage])
    embedding = layout.vocabulary * layout.model.hidden // layout.tp if stage == 0 else 0
    return ProbedShapes(
        linears=linears * blocks,
        tokens=layout.tokens,
        hidden=layout.model.hidden,
        boundaries=2 * blocks,
        parameters=layout.probed_parameters(stage),
        largest=max(embedding, *(linear.elements for linear in linears)),
        shards=layout.dp if layout.distributed_optimizer else 1,
        element=_WEIGHT,
    )


def _bf16_activations(layout: Layout, stage: int, microbatches: int) -> float:
    """Of a call of the schedule with so many microbatches, all linears in bf16."""
    formats = dict.fromkeys(LINEAR_KINDS, (Format.BF16,) * 3)
    kept = len(layout.stages[stage]) * block_activations(layout, formats) * layout.in_flight(stage, microbatches)
    return kept + (_kept_without_recompute(layout, formats) if layout.recompute == "full" else 0.0)


def _row(formats_of: FormatsOf, block: int) -> dict[str, Formats]:
    return {kind: formats_of(block, kind) for kind in LINEAR_KINDS}


def _stream_shards(layout: Layout) -> int:
    """Ranks that share the residual stream and the norms' tensors."""
    return layout.tp if layout.sequence_parallel else 1
