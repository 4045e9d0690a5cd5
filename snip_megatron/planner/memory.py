"""Predicted memory on one GPU of each pipeline stage: parameters, saved activations by format, probes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from snip_megatron.config import SnipConfig
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.probes import measures, probe_microbatches
from snip_megatron.precision import DENSE_LAYER, Format
from snip_megatron.statistics.probe_memory import LinearRows, ProbedShapes
from snip_megatron.timing.cost_model import CostModel
from snip_megatron.timing.shapes import Formats, LinearShape

FormatsOf = Callable[[int, str], Formats]
"""(block, kind of linear) → formats."""

ASSUMPTIONS = (
    "memory: bf16 weights, FP32 gradients, FP32 master weights and two Adam moments (sharded by the distributed"
    " optimizer); fused attention that keeps q, k, v, its output and one number a row; bf16 logits, FP32 softmax, bf16"
    " gradient; the backward's largest temporary is the gradient of the MLP's first linear; operands of emulated"
    " formats in bf16; no CUDA graphs, fragmentation, NCCL buffers or CUDA context",
)

_WEIGHT, _GRADIENT, _OPTIMIZER = 2, 4, 12
_LOGIT = 8  # bytes: bf16 logit, FP32 softmax, bf16 gradient
_TILE, _BLOCK = 128, 128 * 128
NATIVE = (Format.FP8, Format.FP4, Format.FP8_TENSOR)
"""Formats whose operands Hopper's GEMMs take in 8 bits. Operands of the other formats are emulated, in bf16."""
_TILED = (Format.FP8, Format.FP4)
"""Formats with an FP32 scale for each tile or block. Emulated operands keep these scales beside their elements; in the
other formats they are multiplied into the elements."""
_ONE_WEIGHT = (Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4)
"""Formats in which fprop and dgrad read one emulated weight: its scales are those of square blocks, or one scale."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each GPU of a stage.

    Attributes:
        parameters: bf16 weights.
        gradients: FP32 gradients.
        optimizer: FP32 master weights and moments.
        quantised_weights: quantised weights, which are kept from a step's first microbatch to its end.
        activations: activations that are kept for the backward at the schedule's peak.
        logits: logits and their gradients on the last stage.
        working: temporaries of the backward.
        probe: activations and copies of a probe of whole microbatches, which has no quantised weights.
        least_probe: what a probe of one sequence of each microbatch takes in all beyond ``fixed``.
    """

    parameters: float
    gradients: float
    optimizer: float
    quantised_weights: float
    activations: float
    logits: float
    working: float
    probe: float
    least_probe: float

    @property
    def fixed(self) -> float:
        """Bytes that are allocated all the time."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def training(self) -> float:
        """Peak bytes of a training step."""
        return self.fixed + self.quantised_weights + self.activations + self.logits + self.working

    @property
    def probing(self) -> float:
        """Peak bytes of a probe of whole microbatches."""
        return self.fixed + self.probe + self.logits + self.working

    @property
    def probing_least(self) -> float:
        """Peak bytes of a probe of one sequence of each microbatch, which probes take where memory is short."""
        return self.fixed + self.least_probe

    @property
    def peak(self) -> float:
        """The least memory with which training and its updates fit."""
        return max(self.training, self.probing_least)


def native_formats(model: CostModel) -> tuple[Format, ...]:
    """Return ``NATIVE``, or nothing for a table of times of emulated GEMMs (``--snip-gemm emulated``)."""
    emulated = model.table is not None and model.table.backend == "emulated"
    return () if emulated else NATIVE


def stage_memory(
    layout: Layout,
    stage: int,
    formats_of: FormatsOf,
    config: SnipConfig | None = None,
    native: Collection[Format] = NATIVE,
) -> StageMemory:
    """Predict the memory of a stage.

    Args:
        layout: the sizes.
        stage: the pipeline stage.
        formats_of: the formats of the linears.
        config: the configuration, whose updates probe; None for a run without updates.
        native: the formats that are not emulated, see :func:`native_formats`.
    """
    single = dataclasses.replace(layout, micro_batch_size=1)
    parameters = layout.stage_parameters(stage)
    shards = layout.dp if layout.distributed_optimizer else 1
    shapes = layout.linear_shapes()
    blocks = layout.stages[stage]
    kept = sum(block_activations(layout, _row(formats_of, block), native) for block in blocks)
    if layout.recompute == "full":
        working_block = max(_kept_without_recompute(layout, _row(formats_of, block), native) for block in blocks)
    else:
        working_block = 0.0
    weights = sum(
        quantised_weight(shapes[kind], formats_of(block, kind), native) for block in blocks for kind in DENSE_LAYER
    )
    return StageMemory(
        parameters=float(_WEIGHT * parameters),
        gradients=float(_GRADIENT * parameters),
        optimizer=_OPTIMIZER * parameters / shards,
        quantised_weights=weights,
        activations=kept * layout.in_flight(stage),
        logits=_logits(layout, stage),
        working=working_block + _working(layout),
        probe=_probe(layout, stage, config),
        least_probe=_probe(single, stage, config) + _logits(single, stage) + _working(single),
    )


def _logits(layout: Layout, stage: int) -> float:
    return _LOGIT * layout.tokens * layout.vocabulary / layout.tp if stage == layout.pp - 1 else 0.0


def _working(layout: Layout) -> float:
    return 2.0 * layout.tokens * 2 * layout.model.ffn / layout.tp


def block_activations(layout: Layout, formats: Mapping[str, Formats], native: Collection[Format] = NATIVE) -> float:
    """Return the bytes that one block keeps of one microbatch for its backward."""
    if layout.recompute == "full":
        return 2.0 * layout.tokens * layout.model.hidden / _stream_shards(layout)
    return _kept_without_recompute(layout, formats, native)


def _kept_without_recompute(
    layout: Layout, formats: Mapping[str, Formats], native: Collection[Format] = NATIVE
) -> float:
    model, tokens, tp = layout.model, layout.tokens, layout.tp
    queries, keys = (tokens * features for features in layout.attention_features)
    norms = 2 * 2.0 * tokens * model.hidden / _stream_shards(layout)
    heads = 2.0 * (queries + 2 * keys)
    output = 0.0 if layout.recompute == "selective" else 2.0 * queries + 4.0 * tokens * model.heads / tp
    swiglu = 2.0 * tokens * 2 * model.ffn / tp
    inputs = sum(saved_input(layout, kind, formats[kind], native) for kind in DENSE_LAYER)
    return norms + heads + output + swiglu + inputs


def scale_bytes(fmt: Format) -> float:
    """Return the bytes of scales for each element of a quantised operand of X or G."""
    base = fmt.base
    if base is Format.FP8_TENSOR:
        return 0.0
    return 4.0 / _TILE if base in _TILED else 1.0 / (16 if base is Format.NVFP4 else 32)


def packed_bytes(fmt: Format) -> float:
    """Return the bytes in which ranks exchange an element, with its share of the scales."""
    return 2.0 if fmt is Format.BF16 else fmt.bits / 8 + scale_bytes(fmt)


def saved_input(layout: Layout, kind: str, formats: Formats, native: Collection[Format] = NATIVE) -> float:
    """Return the bytes of X that a linear keeps of one microbatch, without what other modules keep anyway.

    A linear keeps the operand of wgrad: elements in E4M3, or in bf16 if the format is emulated, and FP32 scales of
    tiles. If sequence parallelism gathers X, it keeps the shard instead, in bf16 or as it is gathered. In bf16,
    ``linear_proj`` shares X with the attention, which keeps its output itself.
    """
    shape = layout.linear_shapes()[kind]
    wgrad = formats[2]
    if shape.gathered:
        each = 2.0 if layout.communication == "bf16" else packed_bytes(wgrad)
        return each * layout.tokens * shape.k / layout.tp
    elements = float(layout.tokens * shape.k)
    if wgrad is Format.BF16:
        shared = kind == "self_attention.linear_proj" and layout.recompute != "selective"
        return 0.0 if shared else 2.0 * elements
    return elements * _operand(wgrad, _TILE, native)


def quantised_weight(shape: LinearShape, formats: Formats, native: Collection[Format] = NATIVE) -> float:
    """Return the bytes of the quantised operands of W for fprop and dgrad.

    If both are emulated in formats with equal scales, they are one operand.
    """
    sides = [fmt for fmt in formats[:2] if fmt is not Format.BF16]
    if len(sides) == 2 and sides[0] not in native and one_weight(*sides):
        del sides[1]
    return float(shape.n * shape.k) * sum(_operand(fmt, _BLOCK, native) for fmt in sides)


def one_weight(fprop: Format, dgrad: Format) -> bool:
    """Return whether both GEMMs read the same numbers of W (``quantization.exact.shared``, without importing torch)."""
    return fprop.base is dgrad.base and fprop in _ONE_WEIGHT and dgrad in _ONE_WEIGHT


def _operand(fmt: Format, numbers: int, native: Collection[Format]) -> float:
    """Return the bytes of an element of a quantised operand with its share of the scale of ``numbers`` elements."""
    return (1.0 if fmt in native else 2.0) + (4.0 / numbers if fmt in _TILED else 0.0)


def _probe(layout: Layout, stage: int, config: SnipConfig | None) -> float:
    """Return ``probe`` of :class:`StageMemory`: bf16 activations, temporaries of one linear, and the rows that the
    statistics pass samples, which are kept to the end of the update.
    """
    if config is None or not measures(config):
        return 0.0
    each = probe_microbatches(layout, config)
    own = _probed_shapes(layout, stage)
    return own.samples(config.probe_tokens, each) + _bf16_activations(layout, stage, each) + own.recording


def _probed_shapes(layout: Layout, stage: int) -> ProbedShapes:
    linears = [LinearRows(layout.tokens, shape.n, shape.k) for shape in layout.linear_shapes().values()]
    blocks = len(layout.stages[stage])
    return ProbedShapes(
        linears=linears * blocks,
        tokens=layout.tokens,
        hidden=layout.model.hidden,
        boundaries=2 * blocks,
        element=_WEIGHT,
    )


def _bf16_activations(layout: Layout, stage: int, microbatches: int) -> float:
    """Return the bytes of activations of a call of the schedule, with all linears in bf16."""
    formats = dict.fromkeys(DENSE_LAYER, (Format.BF16,) * 3)
    kept = len(layout.stages[stage]) * block_activations(layout, formats) * layout.in_flight(stage, microbatches)
    return kept + (_kept_without_recompute(layout, formats) if layout.recompute == "full" else 0.0)


def _row(formats_of: FormatsOf, block: int) -> dict[str, Formats]:
    return {kind: formats_of(block, kind) for kind in DENSE_LAYER}


def _stream_shards(layout: Layout) -> int:
    """Return the number of ranks over which the residual stream and the norms' activations are sharded."""
    return layout.tp if layout.sequence_parallel else 1
