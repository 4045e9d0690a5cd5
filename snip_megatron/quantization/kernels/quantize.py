"""The quantisers of ``packed.py`` as Triton kernels: same names, arguments and results, one read of the matrix.

Import this module only where Triton can run: on CUDA, or on a CPU with ``TRITON_INTERPRET=1`` (slow; for tests).
"""

from __future__ import annotations

import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.quantization import packed
from snip_megatron.quantization.kernels.arguments import (
    COL_TYPES,
    ROW_TYPES,
    WIDTH,
    are_pairs,
    has_hopper_instructions,
    key_arguments,
    key_memory,
    memory_of,
    parts_of,
    stride_of,
    tile_output,
    types_of,
    values_like,
)
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.kernels.programs import (
    MAXIMA,
    amax_kernel,
    block_kernel,
    tensor_kernel,
    tile_kernel,
)
from snip_megatron.quantization.kernels.wire import add_partials as add_partials
from snip_megatron.quantization.kernels.wire import pack_fp4 as pack_fp4
from snip_megatron.quantization.kernels.wire import unpack_fp4 as unpack_fp4
from snip_megatron.quantization.packed import CachedOperands, Operand, Operands, stored_format
from snip_megatron.quantization.rounding import Key

LAUNCH: dict[str, dict[str, int]] = {
    "tiles": {"num_warps": 8, "maxnreg": 64},
    "fp8 rows": {"num_warps": 8, "maxnreg": 72},  # fp8 along rows and either format along columns
    "stochastic": {"num_warps": 8, "maxnreg": 72},
    "blocks": {"num_warps": 8, "maxnreg": 64},
    "tensor": {"num_warps": 16, "maxnreg": 40},
    "amax": {"num_warps": 8, "maxnreg": 64},
}
"""Launch options of each kind of kernel (``quantize --sweep`` in benchmarks tries others): tiles do not cross warps, so
that many warps with few registers each hide each other's latency."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_tiles(
    x: Tensor,
    row_format: Format | str | None,
    col_format: Format | str | None,
    *,
    row_seed: Key | None = None,
    col_seed: Key | None = None,
    first_row: int = 0,
    cols: Tensor | None = None,
) -> Operands:
    """See :func:`snip_megatron.quantization.packed.quantize_tiles`. The first call
    with given ``cols`` waits for the device to look at them."""
    x = _checked(x)
    if not _is_readable(x):
        seeds = {"row_seed": row_seed, "col_seed": col_seed}
        return packed.quantize_tiles(x, row_format, col_format, **seeds, first_row=first_row, cols=cols)
    M, K = x.shape
    row, row_width = tile_output(x, row_format, M, K)
    col, col_width = tile_output(x, col_format, K, M)
    row_random, col_random = row_seed is not None and row_width == 4, col_seed is not None and col_width == 4
    if not (row_random or col_random):
        cols = x  # one kernel with and without them
    elif cols is None:
        cols = torch.arange(K, device=x.device)
    row_key = key_memory(row_seed if row_random else None, x)
    col_key = key_memory(col_seed if col_random else None, x)
    if x.numel():
        launch(
            tile_kernel, (parts_of(K), parts_of(M)),
            (x, *memory_of(row, x), *memory_of(col, x), cols, row_key, col_key),
            (
                torch.int32, *types_of(row, ROW_TYPES, x), *types_of(col, COL_TYPES, x), cols.dtype, row_key.dtype,
                col_key.dtype,
            ),
            (M, K, K // 2, stride_of(col)), (first_row, *key_arguments(row_seed), *key_arguments(col_seed)),
            {
                "x_stride": x.stride(0) // 2, "row_stride": stride_of(row) // 2,
                "ROW": row_width, "COL": col_width, "ROW_RANDOM": row_random, "COL_RANDOM": col_random,
                "LOADED": row_key is not x or col_key is not x,
                "PAIRED": cols is x or are_pairs(cols), **device_options(x),
            },
            LAUNCH["stochastic" if row_random or col_random else "fp8 rows" if row_width == 8 and col else "tiles"],
        )  # fmt: skip
    return Operands(row, col)


def pack_partial(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`snip_megatron.quantization.wire.pack_partial`."""
    made = quantize_tiles(x, "fp8", None).row
    assert made is not None
    return made.values.view(torch.uint8)[:, : x.shape[1]].contiguous(), made.scale.contiguous()


def quantize_blocks(
    w: Tensor, row_format: Format | str | None, col_format: Format | str | None, *, held: CachedOperands | None = None
) -> Operands:
    """See :func:`snip_megatron.quantization.packed.quantize_blocks`."""
    w = _checked(w)
    if not _is_readable(w):
        return packed.quantize_blocks(w, row_format, col_format, held=held)
    N, K = w.shape
    row, row_width = _block_output(w, row_format, N, K, None if held is None else held.operands.row)
    col, col_width = _block_output(w, col_format, K, N, None if held is None else held.operands.col)
    if w.numel():
        current = w if held is None else held.current
        launch(
            block_kernel, (parts_of(K), parts_of(N)), (w, *memory_of(row, w), *memory_of(col, w), current),
            (torch.int32, *types_of(row, ROW_TYPES, w), *types_of(col, COL_TYPES, w), current.dtype),
            (N, K, K // 2, w.stride(0) // 2, stride_of(row) // 2, stride_of(col)),
            (_scale_stride(row), _scale_stride(col)),
            {
                "ROW": row_width, "COL": col_width, "GROUP": 0, "GUARDED": held is not None, **device_options(w),
            },
            LAUNCH["blocks"],
        )  # fmt: skip
    return Operands(row, col)


def quantize_tensor(
    x: Tensor, *, row: bool = True, col: bool = False, amax: Tensor | None = None, held: CachedOperands | None = None
) -> Operands:
    """See :func:`snip_megatron.quantization.packed.quantize_tensor`; without ``amax`` the matrix is read twice."""
    x = _checked(x)
    if not _is_readable(x):
        return packed.quantize_tensor(x, row=row, col=col, amax=amax, held=held)
    M, K = x.shape
    current = None if held is None else held.current
    row_side, col_side = _tensor_outputs(x, row, col) if held is None else (held.operands.row, held.operands.col)
    written = row_side or col_side
    if x.numel() and written is not None:
        maxima = largest_magnitudes(x, current) if amax is None else _bits(amax)
        scale, flag = written.scale, maxima if current is None else current
        launch(
            tensor_kernel, (parts_of(K), parts_of(M)),
            (x, maxima, memory_of(row_side, x)[0], memory_of(col_side, x)[0], scale, flag),
            (
                torch.int32, maxima.dtype, types_of(row_side, ROW_TYPES, x)[0], types_of(col_side, COL_TYPES, x)[0],
                scale.dtype, flag.dtype,
            ),
            (M, K, K // 2, stride_of(col_side)), (maxima.numel(),),
            {
                "x_stride": x.stride(0) // 2, "row_stride": stride_of(row_side) // 2, "ROW": row, "COL": col,
                "GUARDED": current is not None, **device_options(x),
            },
            LAUNCH["tensor"],
        )  # fmt: skip
    return Operands(row_side, col_side)


def _tensor_outputs(x: Tensor, row: bool, col: bool) -> tuple[Operand | None, Operand | None]:
    """Allocate both operands with one scale, which is 1 if nothing will write it."""
    M, K = x.shape
    scale = (torch.empty if x.numel() else torch.ones)(1, dtype=torch.float32, device=x.device)
    row_side = Operand(values_like(x, M, K), scale, "tensor", K) if row else None
    return row_side, Operand(values_like(x, K, M), scale, "tensor", M) if col else None


def largest_magnitudes(x: Tensor, current: Tensor | None = None) -> Tensor:
    """Return the FP32 bits of max|x| over disjoint pieces of x, int32 [number of pieces]. NaN is above all numbers.

    Each program stores its maximum, so that no memory has to be zero before. The quantiser finds the largest of them.

    Args:
        x: 16-bit [M, K], not empty, K even.
        current: int32 on the device. If it is not zero, the result is not needed, and x is not read.
    """
    M, K = x.shape
    maxima = torch.empty(min(parts_of(M) * parts_of(K), MAXIMA.value), dtype=torch.int32, device=x.device)
    flag = maxima if current is None else current
    launch(
        amax_kernel, (maxima.numel(), 1), (x, maxima, flag), (torch.int32, maxima.dtype, flag.dtype),
        (M, K // 2), (), {"x_stride": x.stride(0) // 2, "GUARDED": current is not None, **device_options(x)},
        LAUNCH["amax"],
    )  # fmt: skip
    return maxima


def _bits(amax: Tensor) -> Tensor:
    return amax.detach().to(torch.float32).reshape(1).view(torch.int32)


def _checked(x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise SnipError(f"quantisation takes a 2-D tensor [rows, cols], not shape {tuple(x.shape)}: flatten it first")
    if x.dtype not in _DTYPES:
        raise SnipError(f"quantisation takes fp32, bf16 or fp16, not {x.dtype}")
    x = x.detach()
    return x if x.stride(1) == 1 else x.contiguous()


def _block_output(
    w: Tensor, format: Format | str | None, rows: int, depth: int, held: Operand | None
) -> tuple[Operand | None, int]:
    if format is None:
        return None, 0
    width = WIDTH.get(format) or WIDTH[stored_format(format)]  # type: ignore[call-overload]
    if held is not None:
        return held, width
    padded = -(-parts_of(depth) // 4) * 4
    create = torch.empty if padded == parts_of(depth) else torch.ones
    scale = create(parts_of(rows), padded, dtype=torch.float32, device=w.device)
    return Operand(values_like(w, rows, depth), scale.t(), "block", depth), width


def _scale_stride(side: Operand | None) -> int:
    return 0 if side is None else side.scale.stride(1)


def _is_readable(x: Tensor) -> bool:
    """Return whether the kernels take x: they read words of two 16-bit numbers. Torch quantises other matrices."""
    return x.element_size() == 2 and x.stride(0) % 2 == 0 and x.shape[1] % 2 == 0 and x.storage_offset() % 2 == 0


def device_options(x: Tensor) -> dict[str, object]:
    """Return the constants of a kernel that depend on the dtype and the device of x."""
    return {"DTYPE": "bf16" if x.dtype is torch.bfloat16 else "fp16", "HARDWARE": has_hopper_instructions(x)}
