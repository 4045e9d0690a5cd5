"""Operands of grouped GEMMs on Hopper: the tiles and blocks of :mod:`.packed` for the linears of all experts at once.

The layouts are DeepGEMM's. Rows are ordered by expert, and every expert has a multiple of 128 of them, so that no tile
holds rows of two experts. ``kernels/grouped.py`` has the same functions in Triton, with the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import TILE
from snip_megatron.quantization.packed import Operand, Operands, quantize_blocks, quantize_tiles
from snip_megatron.quantization.rounding import Key


class GroupRows(NamedTuple):
    """Where the rows of each expert are. Tensors are int32 on the device of the rows.

    Attributes:
        splits: number of rows of each expert, multiples of 128.
        counts, ends: the same numbers, and their running sums, [experts].
        experts: the expert of every row, [rows].
        tiles: for every 128 rows the first such part of their expert, and the number of its parts, [rows/128, 2].
    """

    splits: tuple[int, ...]
    counts: Tensor
    ends: Tensor
    experts: Tensor
    tiles: Tensor


@functools.lru_cache(maxsize=16)  # fc1 and fc2 of a layer have the same rows, in forward and backward
def group_rows(splits: tuple[int, ...], device: torch.device) -> GroupRows:
    """Describe the rows of experts, with one copy to the device."""
    parts = torch.tensor(splits, dtype=torch.int64) // TILE
    ends = parts.cumsum(0)
    tiles = torch.stack([(ends - parts).repeat_interleave(parts), parts.repeat_interleave(parts)], dim=1)
    packed = torch.cat([parts * TILE, ends * TILE, tiles.reshape(-1)]).to(torch.int32)
    packed = packed.to(device, non_blocking=True)
    count = len(splits)
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    experts = torch.repeat_interleave(numbers, packed[:count], output_size=sum(splits))
    return GroupRows(splits, packed[:count], packed[count : 2 * count], experts, packed[2 * count :].view(-1, 2))


def quantize_group_tiles(
    x: Tensor,
    rows: GroupRows,
    row_format: Format | str | None,
    col_format: Format | str | None,
    *,
    row_seed: Key | None = None,
    col_seed: Key | None = None,
    cols: Tensor | None = None,
) -> Operands:
    """Quantise the rows of all experts [M, K] in 1×128 tiles along K and along M.

    Returns:
        ``row`` is that of :func:`.packed.quantize_tiles`. ``col`` has the transposed rows of one expert after the
        other: values [M·K], which are [K, rows] for each expert, and scale [K, M/128] with strides (1, K).
    """
    options: dict[str, Any] = {"cols": cols}
    row = quantize_tiles(x, row_format, None, row_seed=row_seed, **options).row
    if col_format is None:
        return Operands(row, None)
    values, scales, first = [], [], 0
    for part in torch.split(x, list(rows.splits)):
        col = quantize_tiles(part, None, col_format, col_seed=col_seed, first_row=first, **options).col
        assert col is not None
        values.append(col.values.reshape(-1))
        scales.append(col.scale.t())
        first += part.shape[0]
    return Operands(row, Operand(torch.cat(values), torch.cat(scales).t(), "tile", x.shape[0]))


def quantize_group_blocks(w: Tensor, row_format: Format | str | None, col_format: Format | str | None) -> Operands:
    """Quantise weights [experts, N, K] in 128×128 blocks; N and K are multiples of 128.

    Returns:
        ``row``: values [experts, N, K], scale [experts, N/128, K/128]. ``col``: values [experts, K, N], scale
        [experts, K/128, N/128]. All are contiguous.
    """
    made = [quantize_blocks(each, row_format, col_format) for each in w]
    return Operands(_stacked([each.row for each in made]), _stacked([each.col for each in made]))


def _stacked(sides: Sequence[Operand | None]) -> Operand | None:
    found = [side for side in sides if side is not None]
    if not found:
        return None
    scales = [side.scale.t()[:, : side.values.shape[1] // TILE] for side in found]
    return Operand(torch.stack([side.values for side in found]), torch.stack(scales), "block", found[0].depth)
