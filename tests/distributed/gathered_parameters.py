"""``python -m gathered_parameters`` on gloo ranks with ``OUT=<folder>``: one bucket, gathered with quantised weights.

Each rank writes ``rank<k>.pt``: for each case the buffer after the gather, the elements and scales of its weights, and
the bytes that the rank sent.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from snip_megatron.layers.parameter_gather import BufferedParameter, ParameterGather
from snip_megatron.megatron.compat import Traffic
from snip_megatron.precision import Format

FP8, FP4, TENSOR = Format.FP8, Format.FP4, Format.FP8_TENSOR
PARAMETERS = (
    BufferedParameter(0, (65,)),
    BufferedParameter(128, (200, 130), (FP8,)),  # cut within a row by the first rank's end
    BufferedParameter(26176, (7, 33), (FP4,)),  # an odd number of elements
    BufferedParameter(26432, (40, 300), (FP8, FP4)),
    BufferedParameter(38464, (64, 64)),
    BufferedParameter(42560, (150, 129), (TENSOR,)),
)
RANKS = 3
LENGTH = 20700  # of a rank's part; the end of the buffer is padding
CASES = ("numbers", "nan")


def whole(case: str) -> torch.Tensor:
    """The parameters that all ranks should have, [RANKS · LENGTH]."""
    buffer = torch.randn(RANKS * LENGTH, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    if case == "nan":
        buffer[128 + 130 * 150 + 5] = torch.nan  # of rank 0; its tile is also that of rank 1
        buffer[42560 + 7] = torch.inf
    return buffer


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = []
    for case in CASES:
        own, buffer = whole(case), torch.full((RANKS * LENGTH,), 99.0, dtype=torch.bfloat16)
        buffer.view(RANKS, -1)[rank] = own.view(RANKS, -1)[rank]
        gather = ParameterGather(buffer, dist.group.WORLD, PARAMETERS)
        traffic = Traffic()
        undo = traffic.install()
        weights = gather.start().result()
        undo()
        gather.forget_others()
        made = {p.start: {fmt.value: (w.elements, w.scale) for fmt, w in of.items()} for p, of in weights.items()}
        found.append((buffer, made, traffic.take()))
    torch.save(found, Path(os.environ["OUT"]) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
