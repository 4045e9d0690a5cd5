"""``python -m summed_gradients`` on gloo ranks with ``OUT=<folder>``: gradients summed as quantised parts.

Each rank writes ``rank<k>.pt``: for each length of a rank's part, its gradients and its part of the sum; and
``steps<k>.pt``: its part of the sum over several steps of equal gradients, exact, without and with error feedback.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from snip_megatron.layers.communication import ErrorFeedback, start_gradient_reduction

LENGTHS = (1, 130, 384, 2048)
STEPS = 8


def over_steps(rank: int, ranks: int) -> list[torch.Tensor]:
    """Also after a step whose gradients hold a NaN, which must not stay."""
    gradients = torch.randn(ranks * 256, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    exact = gradients.clone()
    dist.all_reduce(exact)
    found, buffer = [STEPS * exact.view(ranks, -1)[rank]], torch.zeros(ranks * 256)
    for feedback in (None, ErrorFeedback()):
        total = torch.zeros(256, dtype=torch.float64)
        for step in range(-1, STEPS):
            buffer.copy_(gradients.float() if step >= 0 else torch.nan)
            shard = buffer.view(ranks, -1)[rank]
            start_gradient_reduction(shard, buffer, None, feedback).result()
            total += shard.double() if step >= 0 else 0
        found.append(total)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(100 * rank + length)
        whole = torch.randn(ranks * length, generator=generator) * 1e-4
        if length == 384:
            whole[130] = torch.nan  # in the second tile of rank 0's part
        before, shard = whole.clone(), whole.view(ranks, length)[rank]
        start_gradient_reduction(shard, whole, None).result()  # into the part itself, as Megatron has it
        found.append((before, whole.view(ranks, length)[rank].clone()))
    torch.save(found, Path(os.environ["OUT"]) / f"rank{rank}.pt")
    torch.save(over_steps(rank, ranks), Path(os.environ["OUT"]) / f"steps{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
