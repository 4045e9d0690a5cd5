"""Finds dimensions whose shards are not multiples of a quantisation tile."""

import argparse

from snip_megatron.megatron.model_linears import ModelLinears
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.precision import Side
from snip_megatron.precision.errors import SnipError


def check_gathers(args: argparse.Namespace, communication: str = "gather") -> None:
    """Check that shards can be quantised before they are gathered, and partial sums before they are exchanged.

    Raises SnipError if nothing is gathered, if the shards of a rank cut tiles, or if Megatron must reduce the output.
    """
    here = f"--snip-communication {communication}"
    if not args.sequence_parallel or args.tensor_model_parallel_size == 1:
        does = "gather nothing" if communication == "gather" else "neither gather nor scatter"
        raise SnipError(
            f"{here}: linears {does} without --sequence-parallel and --tensor-model-parallel-size 2 or more;"
            " add them, or leave it out"
        )
    if communication == "all" and getattr(args, "cpu_offloading_num_layers", 0) > 0:
        raise SnipError(
            f"{here} cannot be combined with --cpu-offloading-num-layers {args.cpu_offloading_num_layers}, under which"
            " Megatron reduces outputs itself; use --snip-communication gather or bf16"
        )
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    tokens = args.seq_length * args.micro_batch_size
    if tokens % (ranks * TILE):
        raise SnipError(
            f"{here}: the {tokens} tokens of a microbatch on {ranks} ranks are {tokens / ranks:g} each, no multiple of"
            f" {TILE}, so that shards cut tiles; choose another --seq-length or --micro-batch-size, or leave it out"
        )


def cut_tiles(args: argparse.Namespace, linears: ModelLinears) -> list[str]:
    """Describe each dimension that is sharded into parts that are not multiples of 128.

    A tile ends at the end of a shard, so such a layout has other tiles, and therefore other statistics, than a layout
    that does not shard the dimension. Returns an empty list if all tiles are the same as on one rank.
    """
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    sizes = {}
    for row in linears.covered:
        side = {Side.OUTPUT: ("rows", row.n), Side.INPUT: ("columns", row.k)}.get(row.sharded)
        if side is not None:
            parts = tp if row.experts == 1 else args.expert_tensor_parallel_size or 1
            sizes[f"{side[0]} of {row.id.path}"] = (side[1], parts)
    tokens = args.seq_length * args.micro_batch_size
    if cp > 1:  # a rank holds two pieces of each sequence, one after the other
        sizes["tokens of a microbatch's pieces"] = (tokens // 2, cp)
    if args.sequence_parallel:
        sizes["tokens of a microbatch"] = (tokens, tp * cp)
    return [
        f"{name} {size} / {parts} ranks = {size / parts:g}"
        for name, (size, parts) in sizes.items()
        if parts > 1 and size % (parts * TILE)
    ]
