"""Partial sums of matrices as ranks exchange them (``--snip-gradient-reduction fp8``), in plain torch.

Each of R ranks holds a term of a sum of matrices, and needs some rows of the sum. A rank quantises its term to FP8
(E4M3) with one FP32 scale for each 1×128 tile, sends every other rank the rows that this rank needs, and adds the rows
that it receives in FP32 in the order of the ranks. The rows of its own term are not sent, and therefore not quantised.
Tiles lie along a row, so that no choice of rows cuts them.

:mod:`snip_megatron.numerics.quantize.kernels.partial_sums` has these functions in Triton.
"""

import functools

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.reference import Quantized, quantize
from snip_megatron.precision import Format


def pack_partial(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a partial sum [rows, cols], fp32, bf16 or fp16, to nearest.

    Returns the elements, uint8 [rows, cols], and the scales of tiles, FP32 [rows, ceil(cols/128)], both contiguous. The
    scale of a tile is NaN if the tile holds a NaN or an Inf.
    """
    q = quantize(x, Format.FP8, axis=1)
    return q.values.to(torch.float8_e4m3fn).view(torch.uint8), q.scale.contiguous()


def add_partials(elements: Tensor, scales: Tensor, local_rows: Tensor, rank: int) -> Tensor:
    """Return the sum of the terms of all ranks.

    Terms are converted to FP32 and added in the order of the ranks. The sum is rounded once.

    Args:
        elements: uint8 [ranks, rows, cols], of :func:`pack_partial` on each rank. Those of ``rank`` are not read.
        scales: FP32 [ranks, rows, ceil(cols/128)].
        local_rows: the rows of this rank's term [rows, cols], not quantised.
        rank: this rank.

    Returns:
        [rows, cols] in the dtype of ``local_rows``.
    """
    terms = [
        local_rows.to(torch.float32)
        if source == rank
        else Quantized(values.view(torch.float8_e4m3fn).to(torch.float32), scale, (1, TILE)).dequantize()
        for source, (values, scale) in enumerate(zip(elements, scales, strict=True))
    ]
    return functools.reduce(torch.add, terms).to(local_rows.dtype)
