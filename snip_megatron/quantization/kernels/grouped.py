"""The quantisers of ``quantization/grouped.py`` as Triton kernels: same names, arguments and results, one read each.

Import this module only where Triton can run, as :mod:`.quantize`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.grouped import GroupRows
from snip_megatron.quantization.kernels.arguments import (
    COL_TYPES,
    ROW_TYPES,
    WIDTH,
    are_pairs,
    key_arguments,
    memory_of,
    parts_of,
    stride_of,
    tile_output,
    types_of,
    values_like,
)
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.kernels.programs import block_kernel, grouped_tile_kernel
from snip_megatron.quantization.kernels.quantize import LAUNCH, device_options
from snip_megatron.quantization.packed import Operand, Operands, stored_format
from snip_megatron.quantization.rounding import Key


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
    """See :func:`snip_megatron.quantization.grouped.quantize_group_tiles`."""
    x = x.detach()
    M, K = x.shape
    row, row_width = tile_output(x, row_format, M, K)
    col, col_width = tile_output(x, col_format, K, M)
    row_random, col_random = row_seed is not None and row_width == 4, col_seed is not None and col_width == 4
    if not (row_random or col_random):
        cols = x
    elif cols is None:
        cols = torch.arange(K, device=x.device)
    if x.numel():
        launch(
            grouped_tile_kernel, (parts_of(K), parts_of(M)),
            (x, *memory_of(row, x), *memory_of(col, x), cols, rows.tiles),
            (torch.int32, *types_of(row, ROW_TYPES, x), *types_of(col, COL_TYPES, x), cols.dtype, rows.tiles.dtype),
            (K, K // 2), (M, *key_arguments(row_seed), *key_arguments(col_seed)),
            {
                "x_stride": x.stride(0) // 2, "row_stride": stride_of(row) // 2,
                "ROW": row_width, "COL": col_width, "ROW_RANDOM": row_random, "COL_RANDOM": col_random,
                "PAIRED": cols is x or are_pairs(cols), **device_options(x),
            },
            LAUNCH["stochastic" if row_random or col_random else "fp8 rows" if row_width == 8 and col else "tiles"],
        )  # fmt: skip
    return Operands(row, None if col is None else col._replace(values=col.values.view(-1)))


def quantize_group_blocks(w: Tensor, row_format: Format | str | None, col_format: Format | str | None) -> Operands:
    """See :func:`snip_megatron.quantization.grouped.quantize_group_blocks`."""
    w = w.detach()
    E, N, K = w.shape
    flat = w.view(E * N, K)
    row, row_width = _block_output(w, row_format, N, K)
    col, col_width = _block_output(w, col_format, K, N)
    launch(
        block_kernel, (parts_of(K), parts_of(E * N)), (flat, *memory_of(row, w), *memory_of(col, w), flat),
        (torch.int32, *types_of(row, ROW_TYPES, w), *types_of(col, COL_TYPES, w), flat.dtype),
        (E * N, K, K // 2, flat.stride(0) // 2, K // 2, N), (parts_of(K), parts_of(N)),
        {
            "ROW": row_width, "COL": col_width, "GROUP": parts_of(N), "GUARDED": False, **device_options(w),
        },
        LAUNCH["blocks"],
    )  # fmt: skip
    return Operands(row, col)


def _block_output(w: Tensor, format: Format | str | None, rows: int, depth: int) -> tuple[Operand | None, int]:
    if format is None:
        return None, 0
    width = WIDTH.get(format) or WIDTH[stored_format(format)]  # type: ignore[call-overload]
    experts = w.shape[0]
    scale = torch.empty(experts, parts_of(rows), parts_of(depth), dtype=torch.float32, device=w.device)
    values = values_like(w, experts * rows, depth).view(experts, rows, depth)
    return Operand(values, scale, "block", depth), width
