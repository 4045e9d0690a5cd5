"""The quantiser of ``quantization/grouped.py`` as a Triton kernel: same name, arguments and results, one read.

Import this module only where Triton can run, as :mod:`.quantize`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snip_megatron.quantization.kernels.arguments import (
    WIDTH,
    device_options,
    memory_of,
    parts_of,
    values_like,
    widths_of,
)
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.kernels.programs import block_kernel
from snip_megatron.quantization.kernels.quantize import LAUNCH
from snip_megatron.quantization.operands import OperandPair, OperandSpec
from snip_megatron.quantization.packed import Operand


def quantize_group_blocks(w: Tensor, spec: OperandSpec) -> OperandPair:
    """See :func:`snip_megatron.quantization.grouped.quantize_group_blocks`."""
    w = w.detach()
    E, N, K = w.shape
    flat = w.view(E * N, K)
    row, col = (
        _block_output(w, rows, depth) if fmt in WIDTH else None
        for fmt, rows, depth in zip(spec.formats, (N, K), (K, N), strict=True)
    )
    launch(
        block_kernel, (parts_of(K), parts_of(E * N)), [(flat, torch.int32), *memory_of(row, col, w), flat],
        (E * N, K, K // 2, flat.stride(0) // 2, K // 2, N), (parts_of(K), parts_of(N)),
        {**widths_of(spec), "GROUP": parts_of(N), "GUARDED": False, **device_options(w)}, LAUNCH["blocks"],
    )  # fmt: skip
    return row, col


def _block_output(w: Tensor, rows: int, depth: int) -> Operand:
    experts = w.shape[0]
    scale = torch.empty(experts, parts_of(rows), parts_of(depth), dtype=torch.float32, device=w.device)
    return Operand(values_like(w, experts * rows, depth).view(experts, rows, depth), scale, "block", depth)
