"""Names, shapes, pipeline stages and FLOPs of the decoder's linears, from Megatron's arguments alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from snip_megatron.errors import SnipError
from snip_megatron.layers.experts import ExpertLayers
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import DENSE_LAYER, Gemm, LinearId, LinearRow


def linear_names(args: argparse.Namespace) -> list[str]:
    """Return the global names of all linears that a precision map covers."""
    experts = ExpertLayers.of(args)
    mixed = frozenset() if experts is None else experts.layers
    kinds = ((layer, kind) for layer in range(args.num_layers) for kind in DENSE_LAYER)
    return [
        str(LinearId("decoder", layer, kind.replace("mlp.", "mlp.experts.") if layer in mixed else kind))
        for layer, kind in kinds
    ]


def model_linears(args: argparse.Namespace) -> tuple[LinearRow, ...]:
    """Return all linears that a precision map covers, with their unsharded shapes."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    head, ffn = args.kv_channels, args.ffn_hidden_size
    queries = heads * (2 if getattr(args, "attention_output_gate", False) else 1)  # a gate has the width of the queries
    shapes = {
        "self_attention.linear_qkv": ((queries + 2 * groups) * head, hidden),
        "self_attention.linear_proj": (hidden, heads * head),
        "mlp.linear_fc1": (ffn * (2 if _gated(args) else 1), hidden),
        "mlp.linear_fc2": (hidden, ffn),
    }
    experts = ExpertLayers.of(args)
    if experts is not None:
        of_each = ((experts.ffn * (2 if _gated(args) else 1), hidden), (hidden, experts.ffn))
        shapes |= dict(zip(("mlp.experts.linear_fc1", "mlp.experts.linear_fc2"), of_each, strict=True))
    rows, stages = [], layer_stages(args)
    for name in linear_names(args):
        linear = LinearId.parse(name)
        mixture = experts.mixture if experts is not None and "experts" in linear.path.split(".") else (1, 1)
        rows.append(LinearRow(name, stages[linear.layer], *shapes[linear.path], *mixture))
    return tuple(rows)


def _gated(args: argparse.Namespace) -> bool:
    """Whether the MLP's first linear has a gate beside its features."""
    return bool(args.swiglu or getattr(args, "quick_geglu", False))


def check_shapes(registry: LinearRegistry, args: argparse.Namespace) -> None:
    """Raise SnipError if a linear of the built model has another shape than Megatron's arguments give it.

    Budgets, costs and pipeline stages come from the arguments. A script's own model provider may build another model.
    """
    rows = {row.name: row for row in model_linears(args)}
    if list(registry.names) != list(rows):
        raise SnipError(
            f"the model has {len(registry.names)} decoder linears, and the arguments say {len(rows)}: build it from"
            " Megatron's arguments (--num-layers, ...), which SNIP reads"
        )
    for built in registry.rows:
        row = rows[built.name]
        if (built.n, built.k) != (row.n, row.k):
            raise SnipError(
                f"{row.name} has the shape {built.n} x {built.k}, and the arguments say {row.n} x {row.k}: build"
                " the model from Megatron's arguments (--hidden-size, ...), which SNIP reads"
            )


def layer_stages(args: argparse.Namespace) -> list[int]:
    """Return the pipeline stage of every decoder layer."""
    counts = _layers_by_chunk(args)
    return [chunk % args.pipeline_model_parallel_size for chunk, count in enumerate(counts) for _ in range(count)]


def _layers_by_chunk(args: argparse.Namespace) -> list[int]:
    """Return the number of layers of each model chunk in the model's order. Chunk c lies on stage c mod stages."""
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        if not isinstance(layout, PipelineParallelLayerLayout):
            layout = PipelineParallelLayerLayout(layout, stages)
        chunks = (layout.layout[stage][chunk] for chunk in range(virtual) for stage in range(stages))
        return [chunk.count(LayerType.decoder) for chunk in chunks]
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        ends = [[] if given is None else [given] for given in (first, last)]
        middle = stages - len(ends[0]) - len(ends[1])
        each = (args.num_layers - (first or 0) - (last or 0)) // max(middle, 1)
        return [layers // virtual for layers in [*ends[0], *[each] * middle, *ends[1]]] * virtual
    embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    counts = [(args.num_layers + embedding + loss) // (stages * virtual)] * (stages * virtual)
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def unquantised_flops(args: argparse.Namespace) -> dict[int, float]:
    """Return pipeline stage → FLOPs per token of the decoder linears that a precision map does not cover.

    These are the shared experts, which process every token; their three GEMMs are added up. Dropped tokens and
    padding are not taken into account. Returns an empty dictionary if there are no such experts.
    """
    experts = ExpertLayers.of(args)
    elements = 0 if experts is None else experts.bf16_elements(args.hidden_size, gated=_gated(args))
    if experts is None or not elements:
        return {}
    of_layer = 2.0 * len(Gemm) * elements
    found, stages = dict.fromkeys(range(args.pipeline_model_parallel_size), 0.0), layer_stages(args)
    for layer in experts.layers:
        found[stages[layer]] += of_layer
    return found


def gemm_flops(rows: Sequence[LinearRow]) -> dict[str, float]:
    """Return name → FLOPs per token of one GEMM of the linear. Its three GEMMs have equal FLOPs."""
    return {row.name: row.flops for row in rows}
