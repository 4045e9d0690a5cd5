"""Where this layout cuts quantisation tiles that another layout does not (DESIGN, rule 10)."""

from __future__ import annotations

import argparse

from snip_megatron.layers.experts import ExpertLayers

TILE = 128


def cut_tiles(args: argparse.Namespace) -> list[str]:
    """What tensor parallelism shards into parts that are no multiples of 128, in words; empty where tiles fall alike.

    The statistics of such a layout are those of its own tiles: right for it, not the numbers of other layouts.
    """
    tp = args.tensor_model_parallel_size
    experts = ExpertLayers.of(args)
    sizes = {"rows of linear_qkv": (_qkv_rows(args), tp), "heads of linear_proj": (_head_columns(args), tp)}
    if experts is None or len(experts.layers) < args.num_layers:
        sizes["ffn"] = (args.ffn_hidden_size, tp)
    if experts is not None:
        sizes["ffn of an expert"] = (experts.ffn, args.expert_tensor_parallel_size or 1)
    if args.sequence_parallel:
        sizes["tokens of a microbatch"] = (args.seq_length * args.micro_batch_size, tp)
    return [
        f"{name} {size} / {parts} ranks = {size / parts:g}"
        for name, (size, parts) in sizes.items()
        if parts > 1 and size % (parts * TILE)
    ]


def _qkv_rows(args: argparse.Namespace) -> int:
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return int((args.num_attention_heads + 2 * groups) * args.kv_channels)


def _head_columns(args: argparse.Namespace) -> int:
    return int(args.num_attention_heads * args.kv_channels)
