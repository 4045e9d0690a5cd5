"""The decoder's linears from Megatron's arguments alone: names, shapes, stages, FLOPs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from snip_megatron.layers.experts import ExpertLayers
from snip_megatron.layers.registry import decoder_linear_names
from snip_megatron.precision import EXPERT_KINDS, Gemm, LinearId
from snip_megatron.statistics.table import LinearRow


def linear_names(args: argparse.Namespace) -> list[str]:
    """Global names of the model's candidate linears."""
    return decoder_linear_names(args.num_layers, ExpertLayers.of(args))


def model_linears(args: argparse.Namespace) -> tuple[LinearRow, ...]:
    """All candidate linears with their unsharded shapes, from Megatron's arguments alone.

    Stages are those of an even split; a custom pipeline layout is known only to the built model.
    """
    hidden, heads = args.hidden_size, args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    head, ffn = args.kv_channels, args.ffn_hidden_size
    shapes = {
        "self_attention.linear_qkv": ((heads + 2 * groups) * head, hidden),
        "self_attention.linear_proj": (hidden, heads * head),
        "mlp.linear_fc1": (ffn * (2 if args.swiglu else 1), hidden),
        "mlp.linear_fc2": (hidden, ffn),
    }
    experts = ExpertLayers.of(args)
    if experts is not None:
        of_each = ((experts.ffn * (2 if args.swiglu else 1), hidden), (hidden, experts.ffn))
        shapes |= dict(zip(EXPERT_KINDS, of_each, strict=True))
    rows = []
    for name in linear_names(args):
        linear = LinearId.parse(name)
        mixture = experts.mixture if experts is not None and linear.of_experts else (1, 1)
        rows.append(LinearRow(name, _stage(args, linear.layer), *shapes[linear.kind], *mixture))
    return tuple(rows)


def _stage(args: argparse.Namespace, layer: int) -> int:
    """Of an even split."""
    chunks = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    per_chunk = max(1, -(-args.num_layers // chunks))
    return int(layer // per_chunk % args.pipeline_model_parallel_size)


def unquantised_flops(args: argparse.Namespace) -> dict[int, float]:
    """Pipeline stage → FLOPs a token of decoder linears that are no candidates, all GEMMs together: the experts'.

    Grouped and shared ones that a token goes through; dropped tokens and padding are not known beforehand. Empty where
    there are none.
    """
    experts = ExpertLayers.of(args)
    elements = 0 if experts is None else experts.bf16_elements(args.hidden_size, gated=args.swiglu)
    if experts is None or not elements:
        return {}
    of_layer = 2.0 * len(Gemm) * elements
    stages = dict.fromkeys(range(args.pipeline_model_parallel_size), 0.0)
    for layer in experts.layers:
        stages[_stage(args, layer)] += of_layer
    return stages


def gemm_flops(rows: Sequence[LinearRow]) -> dict[str, float]:
    """FLOPs a token of one GEMM of each linear; its three are equal."""
    return {row.name: row.flops for row in rows}
