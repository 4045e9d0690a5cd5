"""The functions of ``quantization/swiglu.py`` as Triton kernels, which spare the bf16 result ways through memory.

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
    are_pairs,
    has_hopper_instructions,
    key_arguments,
    key_memory,
    memory_of,
    parts_of,
    stride_of,
    tile_output,
    types_of,
)
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.kernels.swiglu_programs import (
    swiglu_amax_kernel,
    swiglu_gradient_amax_kernel,
    swiglu_gradient_kernel,
    swiglu_kernel,
)
from snip_megatron.quantization.packed import Operands
from snip_megatron.quantization.rounding import Key

LAUNCH: dict[str, dict[str, int]] = {
    "swiglu": {"num_warps": 8, "maxnreg": 80},
    "gradient": {"num_warps": 8, "maxnreg": 128},  # holds parts of three matrices
    "swiglu, amax": {"num_warps": 16, "maxnreg": 40},
    "gradient, amax": {"num_warps": 8, "maxnreg": 128},
}
"""Launch options: the fewest registers with which the assembler spills nothing, or (gradient) little."""
_WORD = torch.int32


def fits(y: Tensor) -> bool:
    """Return whether the kernels take y [M, 2K]: bf16 that is read as words of two numbers, and whole tiles along K."""
    words = y.stride(1) == 1 and y.stride(0) % 2 == 0 and y.storage_offset() % 2 == 0
    return y.dtype is torch.bfloat16 and words and y.shape[1] % (2 * TILE) == 0


def quantize_swiglu(y: Tensor, row_format: Format | None, col_format: Format | None) -> Operands:
    """See :func:`snip_megatron.quantization.swiglu.quantize_swiglu`. Requires :func:`fits`."""
    M, K = y.shape[0], y.shape[1] // 2
    row, row_width = tile_output(y, row_format, M, K)
    col, col_width = tile_output(y, col_format, K, M)
    if y.numel():
        launch(
            swiglu_kernel, (parts_of(K), parts_of(M)), (y, *memory_of(row, y), *memory_of(col, y)),
            (_WORD, *types_of(row, ROW_TYPES, y), *types_of(col, COL_TYPES, y)), (M, K, stride_of(col)), (),
            {
                "y_stride": y.stride(0) // 2, "row_stride": stride_of(row) // 2, "ROW": row_width, "COL": col_width,
                "HARDWARE": has_hopper_instructions(y),
            },
            LAUNCH["swiglu"],
        )  # fmt: skip
    return Operands(row, col)


def quantize_swiglu_gradient(
    d: Tensor,
    y: Tensor,
    row_format: Format | None,
    col_format: Format | None,
    *,
    row_seed: Key | None = None,
    col_seed: Key | None = None,
    cols: Tensor | None = None,
) -> Operands:
    """See :func:`snip_megatron.quantization.swiglu.quantize_swiglu_gradient`. Requires :func:`fits`."""
    M, K = d.shape
    row, row_width = tile_output(y, row_format, M, 2 * K)
    col, col_width = tile_output(y, col_format, 2 * K, M)
    row_random, col_random = row_seed is not None and row_width == 4, col_seed is not None and col_width == 4
    if cols is None and (row_random or col_random):
        cols = torch.arange(2 * K, device=y.device)
    if not (row_random or col_random):
        cols = None  # one kernel with and without them
    row_key = key_memory(row_seed if row_random else None, y)
    col_key = key_memory(col_seed if col_random else None, y)
    ids = y if cols is None else cols
    if y.numel():
        launch(
            swiglu_gradient_kernel, (2 * parts_of(K), parts_of(M)),
            (d, y, *memory_of(row, y), *memory_of(col, y), ids, row_key, col_key),
            (
                _WORD, _WORD, *types_of(row, ROW_TYPES, y), *types_of(col, COL_TYPES, y), ids.dtype, row_key.dtype,
                col_key.dtype,
            ),
            (M, K, stride_of(col)), (*key_arguments(row_seed), *key_arguments(col_seed)),
            {
                "d_stride": d.stride(0) // 2, "y_stride": y.stride(0) // 2, "row_stride": stride_of(row) // 2,
                "ROW": row_width, "COL": col_width, "ROW_RANDOM": row_random, "COL_RANDOM": col_random,
                "LOADED": row_key is not y or col_key is not y, "PAIRED": cols is None or are_pairs(cols),
                "HARDWARE": has_hopper_instructions(y),
            },
            LAUNCH["gradient"],
        )  # fmt: skip
    return Operands(row, col)


def swiglu_with_amax(y: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`snip_megatron.quantization.swiglu.swiglu_with_amax`. Requires :func:`fits`."""
    M, K = y.shape[0], y.shape[1] // 2
    x, amax = y.new_empty(M, K), torch.zeros((), dtype=torch.int32, device=y.device)
    if y.numel():
        launch(
            swiglu_amax_kernel, (parts_of(K), parts_of(M)), (y, x, amax), (_WORD, _WORD, amax.dtype), (M, K), (),
            {"y_stride": y.stride(0) // 2, "HARDWARE": has_hopper_instructions(y)}, LAUNCH["swiglu, amax"],
        )  # fmt: skip
    return x, amax.view(torch.float32)


def swiglu_gradient_with_amax(d: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`snip_megatron.quantization.swiglu.swiglu_gradient_with_amax`. Requires :func:`fits`."""
    M, K = d.shape
    g, amax = y.new_empty(M, 2 * K), torch.zeros((), dtype=torch.int32, device=y.device)
    if y.numel():
        launch(
            swiglu_gradient_amax_kernel, (parts_of(K), parts_of(M)), (d, y, g, amax),
            (_WORD, _WORD, _WORD, amax.dtype), (M, K), (),
            {"d_stride": d.stride(0) // 2, "y_stride": y.stride(0) // 2, "HARDWARE": has_hopper_instructions(y)},
            LAUNCH["gradient, amax"],
        )  # fmt: skip
    return g, amax.view(torch.float32)
