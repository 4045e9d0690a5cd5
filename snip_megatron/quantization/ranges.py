"""Quantisation of a range of a matrix whose rest lies on other ranks, in plain torch.

The distributed optimizer gives each rank a range of the elements of a weight [N, K], in row-major order. Such a range
cuts tiles. A rank therefore takes the amaxes of what it holds of each tile, the maxima over the ranks are the amaxes of
the tiles, and each rank quantises its elements by the scales of these tiles. The numbers are those of
:func:`snip_megatron.quantization.quantize` on the whole weight, bit for bit.

This is done for formats with FP32 scales (:data:`FORMATS`). Their square blocks serve W and Wᵀ alike, so that one
set of elements is enough for fprop and dgrad.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from snip_megatron.precision import FOUR_BIT, Format
from snip_megatron.quantization.formats import SPECS, TILE
from snip_megatron.quantization.fours import pack_fours, unpack_fours
from snip_megatron.quantization.reference import Quantized, fp32_scales, tile_amax
from snip_megatron.quantization.rounding import round_to_element

FORMATS = (Format.FP8, Format.FP4, Format.FP8_TENSOR)
"""Formats of weights that can be quantised range by range."""
BF16_BYTES = 2  # of an element that is not quantised


@dataclass(frozen=True)
class QuantizedWeight:
    """A whole weight [N, K], quantised to one format.

    Attributes:
        elements: float8_e4m3fn [N, K], contiguous. Every number of E2M1 is also one of E4M3.
        scale: FP32, the scales of the tiles: [ceil(N/tile), ceil(K/tile)], or [1, 1] if the tensor has one scale.
    """

    elements: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """Return the numbers of :func:`snip_megatron.quantization.fake_quantize`, FP32 [N, K]."""
        values = self.elements.to(torch.float32)
        tile = tuple(values.shape) if self.scale.numel() == 1 else (TILE, TILE)
        return Quantized(values, self.scale, (tile[0], tile[1])).dequantize()


def formats_to_gather(fprop: Format, dgrad: Format) -> tuple[Format, ...]:
    """Return the formats in which a weight with these two GEMMs is gathered; none if it is gathered in bf16.

    That is the case if a GEMM needs bf16 or a format that cannot be quantised by ranges, or if the elements of both
    formats together have as many bytes as bf16.
    """
    wanted = tuple(dict.fromkeys((fprop, dgrad)))
    if not set(wanted) <= set(FORMATS) or sum(range_bytes(2, fmt) for fmt in wanted) >= 2 * BF16_BYTES:
        return ()
    return wanted


def tile_counts(shape: tuple[int, int], format: Format) -> tuple[int, int]:
    """Return the number of tiles of a weight [N, K] along both dimensions."""
    tile = SPECS[format].tile
    return (-(-shape[0] // tile), -(-shape[1] // tile)) if tile else (1, 1)


def range_amax(x: Tensor, start: int, shape: tuple[int, int], format: Format) -> Tensor:
    """Return max|x| of the part of each tile that is in a range.

    Args:
        x: fp32, bf16 or fp16 [n], elements ``start`` to ``start + n`` of the weight. n is not zero.
        start: index of the first element in the flattened weight.
        shape: shape of the weight, (N, K).
        format: one of :data:`FORMATS`.

    Returns:
        FP32 in the shape of :func:`tile_counts`: NaN for a tile with a NaN in the range, 0 for one that is not in it.
    """
    tile, (_, cols) = SPECS[format].tile, shape
    if not tile:
        return tile_amax(x.view(1, -1), (1, x.numel()))
    above = start // cols // tile  # rows of tiles before the range
    first = above * tile * cols
    rows = x.new_zeros(-(-(start + x.numel() - first) // cols), cols)
    rows.view(-1)[start - first :][: x.numel()] = x.detach()
    found = tile_amax(rows, (tile, tile))
    amax = found.new_zeros(tile_counts(shape, format))
    amax[above : above + len(found)] = found
    return amax


def encode_range(x: Tensor, start: int, shape: tuple[int, int], format: Format, scale: Tensor) -> Tensor:
    """Quantise a range of a weight to nearest.

    Args:
        x, start, shape, format: as in :func:`range_amax`.
        scale: scales of the tiles of the weight, as :func:`scales` returns them.

    Returns:
        uint8 [n], bytes of E4M3 numbers, or [ceil(n/2)] with two E2M1 numbers each.
    """
    tile, (_, cols) = SPECS[format].tile, shape
    values = x.detach().to(torch.float32)
    if tile:
        above = start // cols  # rows before the range
        below = -(-(start + x.numel()) // cols)
        of_rows = scale.repeat_interleave(tile, 1)[:, :cols]
        lines = torch.arange(above, below, device=x.device).div_(tile, rounding_mode="floor")
        values = values / of_rows[lines].view(-1)[start - above * cols :][: x.numel()]
    else:
        values = values / scale.view(1)
    codes = round_to_element(values, SPECS[format].element).to(torch.float8_e4m3fn).view(torch.uint8)
    if format not in FOUR_BIT:
        return codes
    return pack_fours(torch.cat((codes, codes.new_zeros(codes.numel() % 2))).view(1, -1)).view(-1)


def range_bytes(elements: int, format: Format) -> int:
    """Return the number of bytes of :func:`encode_range`."""
    return -(-elements // 2) if format in FOUR_BIT else elements


def scales(amax: Tensor, format: Format) -> Tensor:
    """Return the scales of tiles with these amaxes, both FP32 and of one shape. NaN and Inf give NaN."""
    return fp32_scales(amax, SPECS[format])


def joined(parts: list[tuple[Tensor, int]], shape: tuple[int, int], format: Format, scale: Tensor) -> QuantizedWeight:
    """Return the weight whose ranges, in order, are ``parts``: bytes of :func:`encode_range`, and numbers of elements.

    The result has memory of its own.
    """
    codes = [_unpacked(part)[:count] if format in FOUR_BIT else part for part, count in parts]
    return QuantizedWeight(torch.cat(codes).view(shape).view(torch.float8_e4m3fn), scale)


def _unpacked(packed: Tensor) -> Tensor:
    return unpack_fours(packed.view(1, 1, -1)).view(-1)
