# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Moves rows between a matrix and a padded one, whose experts start at multiples of the rows of a block.

A copy by an index of rows (``index_copy_``) reached 1.3 TB/s on an H100, and needs zeros that are written before.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.launch import launch

_ROWS, _COLS = 16, 512  # of a program


@triton.jit(do_not_specialize=["BLOCKS"])
def rows_kernel(
    from_ptr, to_ptr, table_ptr, BLOCK, COLS, BLOCKS, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """Copy ROWS rows of one block. With PAD, rows of the target that have no source become zero."""
    parts = BLOCK // ROWS
    block, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    first = tl.load(table_ptr + block).to(tl.int64)
    count = tl.load(table_ptr + BLOCKS + block)
    row = part * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    narrow = (first + row)[:, None] * COLS + col[None, :]
    padded = (block.to(tl.int64) * BLOCK + row)[:, None] * COLS + col[None, :]
    inside, valid = col[None, :] < COLS, (row[:, None] < count) & (col[None, :] < COLS)
    if PAD:
        tl.store(to_ptr + padded, tl.load(from_ptr + narrow, mask=valid, other=0.0), mask=inside)
    else:
        tl.store(to_ptr + narrow, tl.load(from_ptr + padded, mask=valid), mask=valid)


def move_rows(x, to, table, block, *, pad):
    """Copy the rows of x [rows, cols] to ``to`` [blocks·block, cols] if ``pad``, or from such an x back.

    Args:
        x, to: contiguous, of one dtype. All rows of ``to`` are written.
        table: int32 [2, blocks], the first row of each block in the matrix without padding, and the number of its rows.
        block: rows of a block, a multiple of 16.
    """
    blocks, cols = table.shape[1], x[0].numel() if len(x) else 1
    if blocks:
        width = min(_COLS, triton.next_power_of_2(cols))
        launch(
            rows_kernel, (blocks * (block // _ROWS), -(-cols // width)), (x, to, table), (block, cols), (blocks,),
            {"ROWS": _ROWS, "WIDTH": width, "PAD": pad}, {"num_warps": 4},
        )  # fmt: skip
