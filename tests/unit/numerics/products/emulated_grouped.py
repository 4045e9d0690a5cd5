"""DeepGEMM's grouped products on a CPU: the layouts that it demands on Hopper, in exact arithmetic, rounded once."""

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE

Pair = tuple[Tensor, Tensor]


def _wide(scale: Tensor, rows: int = 1) -> Tensor:
    return scale.double().repeat_interleave(rows, -2).repeat_interleave(TILE, -1)


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Pair, b: Pair, d: Tensor, experts: Tensor, *, disable_ue8m0_cast: bool
) -> None:
    (values, scale), (weights, blocks) = a, b
    rows, depth = values.shape
    assert disable_ue8m0_cast
    assert values.is_contiguous()
    assert weights.is_contiguous()
    assert blocks.is_contiguous()
    assert scale.shape == (rows, depth // TILE)
    assert scale.stride() == (1, rows)
    assert blocks.shape == (len(weights), weights.shape[1] // TILE, depth // TILE)
    left, right = values.double() * _wide(scale), weights.double() * _wide(blocks, TILE)
    assert d.dtype is torch.bfloat16
    assert experts.dtype is torch.int32
    assert experts.shape == (rows,)
    for first in range(0, rows, TILE):
        (expert,) = set(experts[first : first + TILE].tolist())  # a tile of rows is of one expert
        if expert >= 0:  # the last tiles may be of no expert
            d[first : first + TILE] = left[first : first + TILE] @ right[expert].t()
