"""The functions of ``quantization/rmsnorm.py`` as Triton kernels, which spare the bf16 result its way through memory.

Import this module only where Triton can run: on CUDA, or on a CPU with ``TRITON_INTERPRET=1`` (slow; for tests).
"""

from __future__ import annotations

import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import TILE
from snip_megatron.quantization.kernels.arguments import (
    COL_TYPES,
    ROW_TYPES,
    has_hopper_instructions,
    memory_of,
    parts_of,
    stride_of,
    tile_output,
    types_of,
)
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.kernels.rmsnorm_programs import reciprocal_kernel, rmsnorm_kernel
from snip_megatron.quantization.packed import Operands
from snip_megatron.quantization.rmsnorm import RMSNorm, fp32_reciprocal

LAUNCH: dict[str, dict[str, int]] = {
    "reciprocal": {"enable_fp_fusion": False},  # with as many warps as the order has
    "rmsnorm": {"num_warps": 8, "maxnreg": 80},
}
"""Launch options: the fewest registers with which the assembler spills nothing."""
_WORD = torch.int32
_ALIGNED = 16  # bytes, as other libraries' kernels with these orders require


def fits(x: Tensor, gamma: Tensor, norm: RMSNorm) -> bool:
    """Return whether the kernels take x [M, K] and the weight [K]: bf16, contiguous, aligned, whole tiles along K."""
    dense = x.is_contiguous() and gamma.is_contiguous()
    aligned = dense and x.data_ptr() % _ALIGNED == 0 and gamma.data_ptr() % _ALIGNED == 0
    whole = x.shape[1] % TILE == 0 and norm.order.holds(*x.shape)
    return x.dtype is gamma.dtype is torch.bfloat16 and aligned and whole


def reciprocal_rms(x: Tensor, norm: RMSNorm) -> Tensor:
    """See :func:`snip_megatron.quantization.rmsnorm.reciprocal_rms`. Requires :func:`fits`."""
    (M, K), order = x.shape, norm.order
    rs = torch.empty(M, dtype=torch.float32, device=x.device)
    if M:
        launch(
            reciprocal_kernel, (M, 1), (x, rs), (_WORD, rs.dtype), (), (),
            {
                "x_stride": K // 2, "FEATURES": K, "VECTOR": order.vector, "WARPS": order.warps,
                "CENTRED": order.centred, "EPS": norm.eps, "OF_WARP": fp32_reciprocal(K // order.warps),
                "OF_ROW": fp32_reciprocal(K), "HARDWARE": has_hopper_instructions(x),
            },
            LAUNCH["reciprocal"] | {"num_warps": order.warps},
        )  # fmt: skip
    return rs


def quantize_rmsnorm(
    x: Tensor, gamma: Tensor, rs: Tensor, norm: RMSNorm, row_format: Format | None, col_format: Format | None
) -> Operands:
    """See :func:`snip_megatron.quantization.rmsnorm.quantize_rmsnorm`. Requires :func:`fits`."""
    M, K = x.shape
    row, row_width = tile_output(x, row_format, M, K)
    col, col_width = tile_output(x, col_format, K, M)
    if M:
        launch(
            rmsnorm_kernel, (parts_of(K), parts_of(M)), (x, gamma, rs, *memory_of(row, x), *memory_of(col, x)),
            (_WORD, _WORD, rs.dtype, *types_of(row, ROW_TYPES, x), *types_of(col, COL_TYPES, x)),
            (M, K, stride_of(col)), (),
            {
                "x_stride": K // 2, "row_stride": stride_of(row) // 2, "ZERO_CENTRED": norm.zero_centred,
                "ROW": row_width, "COL": col_width, "HARDWARE": has_hopper_instructions(x),
            },
            LAUNCH["rmsnorm"],
        )  # fmt: skip
    return Operands(row, col)
