"""The quantiser of ``quantization/grouped.py`` as a Triton kernel: same name, arguments and results, one read.

Import this module only where Triton can run, as :mod:`.quantize`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.kernels.arguments import (
    COL_TYPES,
    ROW_TYPES,
    WIDTH,
    memory_of,
    parts_of,
    types_of,
    values_like,
)
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.kernels.programs import block_kernel
from snip_megatron.quantization.kernels.quantize import LAUNCH, device_options
from snip_megatron.quantization.packed import Operand, Operands, stored_format


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
