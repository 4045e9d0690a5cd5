"""The unbiased scales of nvfp4_eden, in plain torch: MS-EDEN of Quartet II (arXiv 2601.22813).

The operand is transformed first, in groups of 128 with random signs (``hadamard.py``), and rounded to nearest with
the scales of nvfp4's tiles. Rounding makes vectors shorter in the mean. EDEN (arXiv 2108.08842) multiplies the rounded
vector Q(z) of a group by ⟨z, z⟩ / ⟨z, Q(z)⟩, which gives it the right projection on z. What remains is an error across
z, whose mean over random rotations is zero. The factor is multiplied into the E4M3 scales of the group's eight tiles.
These are rounded stochastically, so that their mean is not changed.

``kernels/exact_numbers.py`` has the same functions in Triton, with the same bits. Both products are therefore sums of
integers, which are the same in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.quantization.formats import E2M1
from snip_megatron.quantization.hadamard import Signs
from snip_megatron.quantization.rounding import MASK32, ROW_STEP, mix32, round_to_element

TILES = 8
"""Tiles of a group."""

DRAW_STREAM = 0x3C6EF372
# Repeated in kernels/exact_numbers.py.
PRODUCT_STEPS = 4096.0  # steps of a product of two numbers in units of their tile's scale
SCALE_STEPS = 512.0  # E4M3 numbers are multiples of 2^-9
LARGEST = 10.0  # larger than every x over the scale of its tile, so that no sum overflows 63 bits


def corrected_scales(y: Tensor, tile_scale: Tensor, axis: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Multiply the scales of tiles by the factor of their group.

    Args:
        y: FP32 [row tiles, tile rows, column tiles, tile columns], x over the scales of its tiles.
        tile_scale: E4M3 scales in FP32 [row tiles, 1, column tiles, 1]. Tiles with NaN take no part.
        axis: dimension that groups run along, 0 or 1.

    Returns:
        FP32 scales, not rounded, and the integers ⟨z, z⟩ and ⟨z, Q(z)⟩ of each tile's group, int64. All have the shape
        of ``tile_scale``.
    """
    known = torch.isfinite(tile_scale)
    y = torch.where(known, y, 0.0).clamp_(-LARGEST, LARGEST)
    weight = torch.where(known, tile_scale, 0.0).mul(SCALE_STEPS).long().square_()
    square, product = (
        _of_group((y * other).mul_(PRODUCT_STEPS).int().sum((1, 3), keepdim=True) * weight, axis)
        for other in (y, round_to_element(y.clone(), E2M1))
    )
    factor = torch.where(product == 0, 1.0, square.to(torch.float32) / product.to(torch.float32))
    return tile_scale * factor, (square, product)


def draws(signs: Signs, content: tuple[Tensor, Tensor], axis: int) -> Tensor:
    """Return 32 random bits for each tile, int32 in the shape of the scales.

    They are a hash of the key, of what :func:`corrected_scales` found for the tile's group and of the tile's place in
    it. No layout changes them, and every microbatch has its own, although all of a step have one key.
    """
    word = signs.long() if isinstance(signs, Tensor) else signs
    square, product = ((n ^ (n >> 32)) & MASK32 for n in content)
    h = mix32((square + (word ^ DRAW_STREAM)) & MASK32)
    h = mix32((product + h) & MASK32)
    shape = [1, 1, 1, 1]
    shape[2 if axis else 0] = -1
    place = (torch.arange(h.shape[2 if axis else 0], device=h.device) % TILES).view(shape)
    return mix32((place * ROW_STEP + h) & MASK32).to(torch.int32)


def _of_group(tiles: Tensor, axis: int) -> Tensor:
    """Replace the number of each tile [row tiles, 1, column tiles, 1] by the sum over the tiles of its group."""
    rows, cols = tiles.shape[0], tiles.shape[2]
    flat = tiles.view(rows, cols) if axis else tiles.view(rows, cols).t()
    padded = functional.pad(flat, (0, -flat.shape[1] % TILES))
    sums = padded.view(flat.shape[0], -1, TILES).sum(2).repeat_interleave(TILES, 1)[:, : flat.shape[1]]
    return (sums if axis else sums.t()).reshape(rows, 1, cols, 1)
