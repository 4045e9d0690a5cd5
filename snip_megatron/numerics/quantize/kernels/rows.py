# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""The functions of ``quantization/row_map.py`` in Triton, and a quantiser of padded rows that needs no padded copy.

128 padded rows are of one expert, and follow each other in both matrices. A copy by an index of rows (``index_copy_``)
reached 1.3 TB/s on an H100, and needs zeros that are written before.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from snip_megatron.numerics.quantize.kernels.arguments import (
    draws_of,
    has_hopper_instructions,
    memory_of,
    parts_of,
    stride_of,
    tile_output,
    widths_of,
)
from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.kernels.pairs import EDGE, load_pairs
from snip_megatron.numerics.quantize.kernels.programs import quantize_both
from snip_megatron.numerics.quantize.operands import OperandPair, OperandSpec
from snip_megatron.numerics.quantize.row_map import RowMap

LAUNCH = {"quantised rows": {"num_warps": 8, "maxnreg": 64}, "moved rows": {"num_warps": 4}}
_ROWS, _COLS = 16, 512  # of a program that moves rows
_WORDS = ["row_word_0", "row_word_1", "col_word_0", "col_word_1"]


@triton.jit
def _own_rows(experts_ptr, table_ptr, EXPERTS, m):
    """Return the row without padding of the first padded row of part m, and how many of its rows are no padding."""
    expert = tl.load(experts_ptr + m * EDGE)
    before = m * EDGE - tl.load(table_ptr + expert)
    first = tl.load(table_ptr + EXPERTS + expert) + before
    return first.to(tl.int64), tl.load(table_ptr + 2 * EXPERTS + expert) - before


@triton.jit(do_not_specialize=["EXPERTS"])
def rows_kernel(
    from_ptr, to_ptr, experts_ptr, table_ptr, COLS, EXPERTS,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows. With PAD, rows of the target that have no source become zero."""
    parts: tl.constexpr = EDGE // ROWS
    part = tl.program_id(0) // parts
    first, count = _own_rows(experts_ptr, table_ptr, EXPERTS, part)
    row = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    narrow = (first + row)[:, None] * COLS + col[None, :]
    padded = (part.to(tl.int64) * EDGE + row)[:, None] * COLS + col[None, :]
    inside, valid = col[None, :] < COLS, (row[:, None] < count) & (col[None, :] < COLS)
    if PAD:
        tl.store(to_ptr + padded, tl.load(from_ptr + narrow, mask=valid, other=0.0), mask=inside)
    else:
        tl.store(to_ptr + narrow, tl.load(from_ptr + padded, mask=valid), mask=valid)


@triton.jit(do_not_specialize=["EXPERTS", *_WORDS])
def quantised_rows_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, cols_ptr, row_key_ptr, col_key_ptr, experts_ptr, table_ptr,
    M, K, col_stride, EXPERTS, row_word_0, row_word_1, col_word_0, col_word_1,
    x_stride: tl.constexpr, row_stride: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ROW_RANDOM: tl.constexpr,
    COL_RANDOM: tl.constexpr, LOADED: tl.constexpr, PAIRED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise the M padded rows of bf16 x [rows, K] as ``tile_kernel`` quantises a matrix; K is a multiple of 128."""
    k, m = tl.program_id(0), tl.program_id(1)
    first, count = _own_rows(experts_ptr, table_ptr, EXPERTS, m)
    words = load_pairs(x_ptr + (first - m * EDGE) * x_stride, x_stride, m * EDGE + count, K // 2, m, k, False)
    quantize_both(
        words, x_ptr, 0, 0, cols_ptr, row_key_ptr, col_key_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
        M, K, m, k, row_stride, col_stride, 0, row_word_0, row_word_1, col_word_0, col_word_1,
        ROW, COL, ROW_RANDOM, COL_RANDOM, LOADED, PAIRED, False, "bf16", HARDWARE,
    )  # fmt: skip


def quantize_rows(x: Tensor, spec: OperandSpec, rows: RowMap) -> OperandPair:
    """Return the padded rows of x, bf16 [rows, K] and contiguous, as ``quantize_operands`` does. K is a multiple of
    128.
    """
    M, K = len(rows.experts), x.shape[1]
    row, col = tile_output(x, spec.rowwise, M, K), tile_output(x, spec.columnwise, K, M)
    if M:
        draws = draws_of(spec, K, x)
        launch(
            quantised_rows_kernel, (parts_of(K), parts_of(M)),
            [(x, torch.int32), *memory_of(row, col, x), *draws.memory, *rows], (M, K, stride_of(col)),
            (rows.table.shape[1], *draws.words),
            {
                "x_stride": x.stride(0) // 2, "row_stride": stride_of(row) // 2, **widths_of(spec), **draws.constants,
                "HARDWARE": has_hopper_instructions(x),
            },
            LAUNCH["quantised rows"],
        )  # fmt: skip
    return row, col


def pad(rows: RowMap, x: Tensor) -> Tensor:
    """See :meth:`snip_megatron.numerics.quantize.row_map.RowMap.pad`."""
    return _moved(rows, x, len(rows.experts), pad=True)


def unpad(rows: RowMap, padded: Tensor, count: int) -> Tensor:
    """See :meth:`snip_megatron.numerics.quantize.row_map.RowMap.unpad`."""
    return _moved(rows, padded, count, pad=False)


def _moved(rows, x, count, *, pad):
    to, cols, parts = x.new_empty(count, *x.shape[1:]), math.prod(x.shape[1:]), parts_of(len(rows.experts))
    if parts and cols:
        width = min(_COLS, triton.next_power_of_2(cols))
        launch(
            rows_kernel, (parts * (EDGE.value // _ROWS), -(-cols // width)), (x.contiguous(), to, *rows), (cols,),
            (rows.table.shape[1],), {"ROWS": _ROWS, "WIDTH": width, "PAD": pad}, LAUNCH["moved rows"],
        )  # fmt: skip
    return to
