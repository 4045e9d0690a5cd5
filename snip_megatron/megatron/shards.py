"""Where this layout cuts quantisation tiles that another layout does not (DESIGN, rule 10)."""

from __future__ import annotations

import argparse

from snip_megatron.megatron.model_linears import model_linears
from snip_megatron.quantization.formats import TILE


def cut_tiles(args: argparse.Namespace) -> list[str]:
    """What is sharded into parts that are no multiples of 128, in words; empty where tiles fall alike.

    The statistics of such a layout are those of its own tiles: right for it, not the numbers of other layouts.
    """
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    rows = {row.id.kind: row for row in model_linears(args)}  # all layers' of a kind have one shape
    sizes = {
        "rows of linear_qkv": (rows["self_attention.linear_qkv"].n, tp),
        "heads of linear_proj": (rows["self_attention.linear_proj"].k, tp),
    }
    if dense := rows.get("mlp.linear_fc2"):
        sizes["ffn"] = (dense.k, tp)
    if expert := rows.get("mlp.experts.linear_fc2"):
        sizes["ffn of an expert"] = (expert.k, args.expert_tensor_parallel_size or 1)
    tokens = args.seq_length * args.micro_batch_size
    if cp > 1:  # a rank holds two pieces of each sequence, one behind the other
        sizes["tokens of a microbatch's pieces"] = (tokens // 2, cp)
    if args.sequence_parallel:
        sizes["tokens of a microbatch"] = (tokens, tp * cp)
    return [
        f"{name} {size} / {parts} ranks = {size / parts:g}"
        for name, (size, parts) in sizes.items()
        if parts > 1 and size % (parts * TILE)
    ]
