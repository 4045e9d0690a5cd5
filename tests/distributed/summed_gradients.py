"""Gradients summed as quantised parts, on gloo ranks: module of warm ranks, with ``OUT=<folder>``.

Each rank writes ``rank<k>.pt``: for each length of a rank's part, its gradients and its part of the sum.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from snip_megatron.megatron.startup import prepare

LENGTHS = (1, 130, 384, 2048)


def main() -> None:
    prepare([], [])
    from snip_megatron.megatron.compat.gradients import start_gradient_reduction

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(100 * rank + length)
        whole = torch.randn(ranks * length, generator=generator) * 1e-4
        if length == 384:
            whole[130] = torch.nan  # in the second tile of rank 0's part
        before, shard = whole.clone(), whole.view(ranks, length)[rank]
        start_gradient_reduction(shard, whole, None)()  # into the part itself, as Megatron has it
        found.append((before, whole.view(ranks, length)[rank].clone()))
    torch.save(found, Path(os.environ["OUT"]) / f"rank{rank}.pt")
    dist.destroy_process_group()
