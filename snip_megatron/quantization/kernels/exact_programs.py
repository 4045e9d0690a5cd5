# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Programs that quantise a matrix to bf16 numbers, in one or both orientations.

A program makes one orientation of a part, the row side or the col side. The two programs of a part follow each other,
so that the second finds the part in the L2 cache. Each has the numbers in the order that suits its tiles. On the col
side a part has as many rows as a tile, and a thread holds whole columns of it. On the row side a thread holds
neighbouring columns, so that few threads share a tile.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.elements import INFINITY_BITS, magnitude_bits, to_float32
from snip_megatron.quantization.kernels.exact_memory import load_part
from snip_megatron.quantization.kernels.exact_numbers import largest
from snip_megatron.quantization.kernels.exact_sides import side
from snip_megatron.quantization.kernels.exact_transform import signs_of, transformed

_RANDOM_ARGUMENTS = ["row_word_0", "row_word_1", "col_word_0", "col_word_1", "signs"]


@triton.jit(do_not_specialize=_RANDOM_ARGUMENTS)
def exact_kernel(
    x_ptr, row_ptr, row_scale_ptr, row_amax_ptr, col_ptr, col_scale_ptr, col_amax_ptr, cols_ptr,
    row_key_ptr, col_key_ptr, current_ptr, signs_ptr,
    M, row_word_0, row_word_1, col_word_0, col_word_1, signs,
    ROW: tl.constexpr, ROW_SCALING: tl.constexpr, ROW_TILE: tl.constexpr, ROW_RANDOM: tl.constexpr,
    ROW_LOADED: tl.constexpr, ROW_FOUR: tl.constexpr,
    COL: tl.constexpr, COL_SCALING: tl.constexpr, COL_TILE: tl.constexpr, COL_RANDOM: tl.constexpr,
    COL_LOADED: tl.constexpr, COL_FOUR: tl.constexpr,
    SQUARE_ROW: tl.constexpr, SQUARE_COL: tl.constexpr,
    TURNED: tl.constexpr, SIGNS_LOADED: tl.constexpr,
    GIVEN_COLS: tl.constexpr, GUARDED: tl.constexpr,
    GPU: tl.constexpr, K: tl.constexpr, x_stride: tl.constexpr, R: tl.constexpr,
    ROW_C: tl.constexpr, ROW_WIDE: tl.constexpr, COL_C: tl.constexpr, COL_WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Quantise a matrix [M, K] in tiles along its columns (row side) and along its rows (col side).

    ``ROW`` and ``COL`` are the bits of an element, 0 for no side. With ``TURNED`` the col side
    is transformed and filled up to whole groups of 16 rows. ``ROW_C`` and ``COL_C`` are
    the columns that a program has on a side, and ``STEPS`` its parts, one below the other. The compiler gives equal
    sizes the same order of numbers in threads.
    ``current_ptr``: see ``programs.py``.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    m = tl.program_id(1)
    # Programs of a part on either side. Where a side is missing, the other has one.
    ROWS: tl.constexpr = (max(ROW_C, COL_C) // ROW_C if COL else 1) if ROW else 0
    COLS: tl.constexpr = (max(ROW_C, COL_C) // COL_C if ROW else 1) if COL else 0
    part, place = tl.program_id(0) // (ROWS + COLS), tl.program_id(0) % (ROWS + COLS)
    if ROW:  # noqa: SIM102 - decided when compiled, and when run
        if (COLS == 0) or (place < ROWS):
            side(
                x_ptr, M, K, x_stride, m, part * ROWS + place, row_ptr, row_scale_ptr, row_amax_ptr, cols_ptr,
                row_key_ptr, row_word_0, row_word_1, signs_ptr, signs,
                True, ROW, ROW_SCALING, ROW_TILE, ROW_RANDOM, ROW_LOADED, ROW_FOUR, SQUARE_ROW, False,
                False, GIVEN_COLS, GPU, R, ROW_C, ROW_WIDE, STEPS,
            )  # fmt: skip
    if COL:  # noqa: SIM102
        if (ROWS == 0) or (place >= ROWS):
            side(
                x_ptr, M, K, x_stride, m, part * COLS + place - ROWS, col_ptr, col_scale_ptr, col_amax_ptr,
                cols_ptr, col_key_ptr, col_word_0, col_word_1, signs_ptr, signs,
                False, COL, COL_SCALING, COL_TILE, COL_RANDOM, COL_LOADED, COL_FOUR, SQUARE_COL, TURNED,
                SIGNS_LOADED, GIVEN_COLS, GPU, R, COL_C, COL_WIDE, STEPS,
            )  # fmt: skip


@triton.jit
def _finite(tiles):
    """Return the largest of those tiles' integers that are magnitudes of finite numbers."""
    found = largest(tiles)
    found = tl.where(found < INFINITY_BITS, found, 0)
    return tl.max(tl.reshape(found, (found.shape[0] * found.shape[2],)), axis=0)


@triton.jit(do_not_specialize=["signs"])
def exact_amax_kernel(
    x_ptr, amax_ptr, current_ptr, signs_ptr, M, signs,
    TILE: tl.constexpr, SQUARE: tl.constexpr,
    TURNED: tl.constexpr, SIGNS_LOADED: tl.constexpr,
    GUARDED: tl.constexpr, GPU: tl.constexpr,
    K: tl.constexpr, x_stride: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Update ``amax_ptr`` (int32, zero before) with the bits of max|x| over the tiles of either side.

    With ``TILE`` 0 a NaN or Inf is the maximum. Otherwise only finite tiles of ``TILE`` numbers count, along the
    columns at 0 and along the rows at 4; with ``SQUARE`` blocks for both. ``TURNED``: see :func:`exact_kernel`.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    x = load_part(x_ptr, x_stride, M, K, tl.program_id(1), tl.program_id(0), R, C, WIDE)
    bits = magnitude_bits(to_float32(x))
    row = tl.max(tl.max(bits, axis=0), axis=0)
    col_bits, col = bits, row
    if TURNED:
        col_bits = magnitude_bits(transformed(x, signs_of(signs_ptr, signs, SIGNS_LOADED)))
        col = tl.max(tl.max(col_bits, axis=0), axis=0)
    if TILE > 0:  # noqa: SIM102 - decided when compiled, and when run
        if max(row, col) >= INFINITY_BITS:
            if SQUARE:
                row = _finite(tl.reshape(bits, (R // TILE, TILE, C // TILE, TILE)))
                col = row
            else:
                row = _finite(tl.reshape(bits, (R, 1, C // TILE, TILE)))
                col = _finite(tl.reshape(col_bits, (R // TILE, TILE, C, 1)))
    # Few programs find a number that is larger than what is there, and atomics at one address wait for each other.
    tl.atomic_max(amax_ptr, row, mask=row > tl.load(amax_ptr, cache_modifier=".cg"))
    tl.atomic_max(amax_ptr + 4, col, mask=col > tl.load(amax_ptr + 4, cache_modifier=".cg"))
