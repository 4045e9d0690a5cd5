"""Predicted memory on one GPU of each pipeline stage: parameters, saved activations by format, and probes."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from snip_megatron.planner.layout import Layout
from snip_megatron.precision import ALL_BF16, Format, Formats, LinearRow, Role
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity.probe_memory import LinearRows, ProbedShapes
from snip_megatron.timing.cost_model import LinearShape

FormatsOf = Callable[[LinearRow], Formats]

ASSUMPTIONS = (
    "memory: bf16 weights, FP32 master weights and two Adam moments (sharded by the distributed optimizer); every"
    " linear keeps its X, and what reads it its Y; fused attention that keeps one number a row; bf16 logits, FP32"
    " softmax, bf16 gradient; the backward's largest temporary is the gradient of the widest Y; operands of emulated"
    " formats in bf16; no states of scans, CUDA graphs, fragmentation, NCCL buffers or CUDA context",
)

_WEIGHT, _OPTIMIZER = 2, 12
_LOGIT = 8  # bytes: bf16 logit, FP32 softmax, bf16 gradient
_TILE, _BLOCK = 128, 128 * 128
_NATIVE = (Format.FP8, Format.FP4, Format.FP8_TENSOR)
"""Formats whose operands Hopper's GEMMs take in 8 bits. Operands of the other formats are emulated, in bf16."""
_TILED = (Format.FP8, Format.FP4)
"""Formats with an FP32 scale for each tile or block. In the others, scales are multiplied into emulated elements."""


def stage_memory(
    layout: Layout, stage: int, formats_of: FormatsOf, config: SnipConfig | None = None
) -> dict[str, float]:
    """Predict the memory of each GPU of a stage: name → bytes.

    ``quantised_weights`` are allocated from a step's first microbatch to its end, ``activations`` are saved for the
    backward at the schedule's peak, and ``working`` are temporaries of the backward. ``training`` is the sum of all
    that training takes. ``probe`` are activations and copies of a probe of whole microbatches, which has no quantised
    weights, and ``least_probe`` is what a probe of one sequence of each microbatch takes in all. Probes take that where
    memory is short. ``probing`` and ``probing_least`` are these with what is allocated all the time. ``peak`` is the
    least memory with which training and its updates fit.

    ``config`` is the configuration of the updates. None if the run has no updates.
    """
    single = dataclasses.replace(layout, micro_batch_size=1)
    parameters, layers = layout.stage_parameters(stage), layout.stages[stage]
    shards = layout.dp * layout.cp if layout.distributed_optimizer else 1
    saved, recomputed = _activations(layout, layers, formats_of)
    weights = (quantised_weight(layout.shapes[row.name], formats_of(row)) for layer in layers for row in layer)
    always = {
        "parameters": float(_WEIGHT * parameters),
        "gradients": float(layout.gradient_bytes * parameters),
        "optimizer": _OPTIMIZER * parameters / shards,
    }
    once = {"logits": _logits(layout, stage), "working": recomputed + _working(layout)}
    steps = {"quantised_weights": math.fsum(weights), "activations": saved * layout.in_flight(stage)}
    probe = _probe(layout, stage, config)
    least_probe = _probe(single, stage, config) + _logits(single, stage) + _working(single)
    fixed = math.fsum(always.values())
    training = fixed + math.fsum((once | steps).values())
    return {
        **(always | steps | once),
        "probe": probe,
        "least_probe": least_probe,
        "training": training,
        "probing": fixed + probe + math.fsum(once.values()),
        "probing_least": fixed + least_probe,
        "peak": max(training, fixed + least_probe),
    }


def _logits(layout: Layout, stage: int) -> float:
    return _LOGIT * layout.tokens * layout.vocabulary / layout.tp if stage == layout.pp - 1 else 0.0


def _working(layout: Layout) -> float:
    return max(2.0 * _elements(layout, row, layout.shapes[row.name].n) for row in layout.model.rows)


def _elements(layout: Layout, row: LinearRow, features: int) -> float:
    """Return the elements of a microbatch in so many features, of all experts and predictions."""
    return float(layout.shapes[row.name].tokens * features * layout.passes(row))


def _activations(layout: Layout, layers: Sequence[Sequence[LinearRow]], formats_of: FormatsOf) -> tuple[float, float]:
    """Return the bytes that layers keep of one microbatch, and those of the largest layer that is recomputed whole."""
    saved = recomputed = 0.0
    for layer in layers:
        if layout.recompute == "full" and layout.recomputed(layer[0]):
            saved += 2.0 * layout.stream
            recomputed = max(recomputed, layer_activations(layout, layer, formats_of))
        else:
            saved += layer_activations(layout, layer, formats_of)
    return saved, recomputed


def layer_activations(layout: Layout, layer: Sequence[LinearRow], formats_of: FormatsOf) -> float:
    """Return the bytes that a layer keeps of one microbatch for its backward, if that does not recompute it whole."""
    saved = 2.0 * layout.stream * len({row.sub_block for row in layer})  # the inputs of norms
    for row in layer:
        if layout.recompute == "selective" and layout.recomputed(row):
            continue
        shape = layout.shapes[row.name]
        saved += saved_input(layout, row, formats_of(row))
        saved += 0.0 if row.role is Role.WRITES else 2.0 * _elements(layout, row, shape.n)
        if after_attention(row) and not _recomputes_attention(layout):
            saved += 2.0 * _elements(layout, row, shape.k) + 4.0 * layout.tokens * layout.model.heads / layout.tp
    return saved


def after_attention(row: LinearRow) -> bool:
    """Return whether a linear reads the output of an attention that keeps it."""
    return row.id.path.endswith("attention.linear_proj")


def _recomputes_attention(layout: Layout) -> bool:
    return layout.recompute == "selective" and "core_attn" in layout.recompute_modules


def saved_input(layout: Layout, row: LinearRow, formats: Formats) -> float:
    """Return the bytes of X that a linear keeps of one microbatch, without what other modules keep anyway.

    A linear keeps the operand of wgrad: elements in E4M3, or in bf16 if the format is emulated, and FP32 scales of
    tiles. If sequence parallelism gathers X, it keeps the shard instead, in bf16. In bf16, the linear after attention
    shares X with the attention, which keeps its output itself.
    """
    shape, wgrad = layout.shapes[row.name], formats[2]
    elements = _elements(layout, row, shape.k)
    if shape.gathered:
        return 2.0 * elements / layout.tp
    if wgrad is Format.BF16:
        shared = after_attention(row) and not _recomputes_attention(layout)
        return 0.0 if shared else 2.0 * elements
    return elements * _operand(wgrad, _TILE)


def quantised_weight(shape: LinearShape, formats: Formats) -> float:
    """Return the bytes of the quantised operands of W for fprop and dgrad."""
    sides = [fmt for fmt in formats[:2] if fmt is not Format.BF16]
    return float(shape.n * shape.k * shape.matrices) * sum(_operand(fmt, _BLOCK) for fmt in sides)


def _operand(fmt: Format, numbers: int) -> float:
    """Return the bytes of an element of a quantised operand with its share of the scale of ``numbers`` elements."""
    return (1.0 if fmt in _NATIVE else 2.0) + (4.0 / numbers if fmt in _TILED else 0.0)


def probe_microbatches(layout: Layout, config: SnipConfig) -> int:
    """Return the microbatches that a rank runs in one pass of an update."""
    return config.probed_microbatches(layout.microbatches, layout.pp if layout.vpp > 1 else 1)


def _probe(layout: Layout, stage: int, config: SnipConfig | None) -> float:
    """Return ``probe`` of :func:`stage_memory`: bf16 activations, temporaries of one linear, and sampled rows.

    The rows that the statistics pass samples stay allocated to the end of the update.
    """
    if config is None or not config.updates:
        return 0.0
    microbatches, layers = probe_microbatches(layout, config), layout.stages[stage]
    rows = [row for layer in layers for row in layer]
    shapes = [(layout.shapes[row.name], layout.passes(row)) for row in rows]
    linears = [LinearRows(shape.tokens, shape.n, shape.k) for shape, count in shapes for _ in range(count)]
    boundaries = len({row.sub_block for row in rows})
    probed = ProbedShapes(linears, layout.tokens, layout.model.hidden, boundaries, _WEIGHT)
    saved, recomputed = _activations(layout, layers, lambda row: ALL_BF16)
    passes = saved * layout.in_flight(stage, microbatches) + recomputed
    return probed.samples(config.probe_tokens, microbatches) + passes + probed.recording
