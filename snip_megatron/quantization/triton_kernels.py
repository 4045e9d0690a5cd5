# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of the quantisers: one program reads one 128×128 part of a matrix once and writes what GEMMs need."""

import triton
import triton.language as tl

from snip_megatron.quantization.triton_elements import decode, encode, random_bits, tile_scale

EDGE = tl.constexpr(128)
_RANDOM_ARGUMENTS = ["row_start", "col_start", *(f"{side}_word_{i}" for side in ("row", "col") for i in range(3))]


@triton.jit
def _ids(ids_ptr, start, index, mask, GIVEN: tl.constexpr):
    """Global ids of the local ``index``: looked up, or counted from ``start``."""
    if GIVEN:
        ids = tl.load(ids_ptr + index, mask=mask, other=0)
    else:
        ids = index + start
    return ids


@triton.jit
def _to_float32(x):
    if x.dtype == tl.bfloat16:  # its bits are FP32's upper half; the interpreter's own conversion loses subnormals
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _part(x_ptr, x_stride, M, K, m, k):
    """FP32 [128, 128] at part (m, k), zero outside the matrix; local ids and masks of its rows and columns."""
    i = tl.arange(0, EDGE)
    rows, cols = m * EDGE + i, k * EDGE + i
    row_mask, col_mask = rows < M, cols < K
    base = x_ptr + m.to(tl.int64) * EDGE * x_stride + k * EDGE
    x = tl.load(base + i[:, None] * x_stride + i[None, :], mask=row_mask[:, None] & col_mask[None, :], other=0.0)
    return _to_float32(x), rows, cols, row_mask, col_mask


@triton.jit
def _store(ptr, code, m, k, stride, row_mask):
    """Bytes [128, 128] to part (m, k) of a matrix whose width is padded to 128."""
    i = tl.arange(0, EDGE)
    base = ptr + m.to(tl.int64) * EDGE * stride + k * EDGE
    tl.store(base + i[:, None] * stride + i[None, :], code, mask=row_mask[:, None])


@triton.jit
def _side(
    x, amax, row_ids, col_ids, word_0, word_1, word_2, out_ptr, out_stride, scale_ptr, m, k, out_mask,
    sum_ptr, sum_mask,
    AXIS: tl.constexpr, FORMAT: tl.constexpr, STORE: tl.constexpr, SUM: tl.constexpr, RANDOM: tl.constexpr,
    CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One format in tiles along columns (``AXIS`` 1) or rows (0, stored transposed); ``amax`` holds bits, a tile each.

    Stochastic quotients get a second correction: there every bit decides, not only those next to a tie.
    """
    scale = tile_scale(amax, FORMAT, CORRECTIONS, HARDWARE)
    wide = tl.expand_dims(scale, AXIS)
    bits = random_bits(row_ids, col_ids, word_0, word_1, word_2) if RANDOM else x
    code = encode(x, wide, bits, FORMAT, RANDOM, 2 * CORRECTIONS if RANDOM else CORRECTIONS, HARDWARE)
    if STORE:
        _store(out_ptr, code if AXIS == 1 else tl.trans(code), m, k, out_stride, out_mask)
        tl.store(scale_ptr, scale, mask=out_mask)
    if SUM:
        error = decode(code) * wide - x
        tl.store(sum_ptr, tl.sum(error * error, axis=0), mask=sum_mask)


@triton.jit(do_not_specialize=_RANDOM_ARGUMENTS)
def tile_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, sums_ptr, rows_ptr, cols_ptr,
    M, K, x_stride, row_stride, col_stride, row_start, col_start,
    row_word_0, row_word_1, row_word_2, col_word_0, col_word_1, col_word_2,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_RANDOM: tl.constexpr, COL_RANDOM: tl.constexpr,
    SUMS: tl.constexpr, SUM_8: tl.constexpr, SUM_4: tl.constexpr, GIVEN_ROWS: tl.constexpr, GIVEN_COLS: tl.constexpr,
    CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """1×128 tiles along K (``ROW``: 0, 4 or 8) and along M (``COL``), and column sums of x² and squared errors.

    ``SUM_8`` and ``SUM_4`` are the places of the candidates in ``sums`` [places, parts of M, K]; 0: not wanted.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    x, rows, cols, row_mask, col_mask = _part(x_ptr, x_stride, M, K, m, k)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # integers order as magnitudes do, NaN above Inf
    row_ids, col_ids = rows, cols
    if ROW_RANDOM or COL_RANDOM:
        row_ids = _ids(rows_ptr, row_start, rows, row_mask, GIVEN_ROWS)
        col_ids = _ids(cols_ptr, col_start, cols, col_mask, GIVEN_COLS)
    place = tl.num_programs(1).to(tl.int64) * K
    sum_ptr = sums_ptr + m.to(tl.int64) * K + cols
    if SUMS:
        tl.store(sum_ptr, tl.sum(x * x, axis=0), mask=col_mask)
    if (ROW > 0) or SUMS:
        scale_ptr = row_scale_ptr + k.to(tl.int64) * M + rows
        amax = tl.max(magnitude, axis=1)
        if (ROW == 8) or (SUM_8 > 0):
            _side(
                x, amax, row_ids, col_ids, row_word_0, row_word_1, row_word_2,
                row_ptr, row_stride, scale_ptr, m, k, row_mask,
                sum_ptr + SUM_8 * place, col_mask,
                1, 8, ROW == 8, SUM_8 > 0, False, CORRECTIONS, HARDWARE,
            )  # fmt: skip
        if (ROW == 4) or (SUM_4 > 0):
            _side(
                x, amax, row_ids, col_ids, row_word_0, row_word_1, row_word_2,
                row_ptr, row_stride, scale_ptr, m, k, row_mask,
                sum_ptr + SUM_4 * place, col_mask,
                1, 4, ROW == 4, SUM_4 > 0, ROW_RANDOM, CORRECTIONS, HARDWARE,
            )  # fmt: skip
    if (COL > 0) or SUMS:
        scale_ptr = col_scale_ptr + m.to(tl.int64) * K + cols
        amax = tl.max(magnitude, axis=0)
        if (COL == 8) or (SUM_8 > 0):
            _side(
                x, amax, row_ids, col_ids, col_word_0, col_word_1, col_word_2,
                col_ptr, col_stride, scale_ptr, k, m, col_mask,
                sum_ptr + (SUM_8 + 1) * place, col_mask,
                0, 8, COL == 8, SUM_8 > 0, False, CORRECTIONS, HARDWARE,
            )  # fmt: skip
        if (COL == 4) or (SUM_4 > 0):
            _side(
                x, amax, row_ids, col_ids, col_word_0, col_word_1, col_word_2,
                col_ptr, col_stride, scale_ptr, k, m, col_mask,
                sum_ptr + (SUM_4 + 1) * place, col_mask,
                0, 4, COL == 4, SUM_4 > 0, COL_RANDOM, CORRECTIONS, HARDWARE,
            )  # fmt: skip


@triton.jit
def _block_side(
    x, amax, row_ptr, col_ptr, row_scale_ptr, col_scale_ptr, m, k, row_stride, col_stride, row_mask, col_mask,
    FORMAT: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    corner = tl.zeros((1, 1), tl.int32)
    scale = tile_scale(corner + amax, FORMAT, CORRECTIONS, HARDWARE)
    code = encode(x, scale, x, FORMAT, False, CORRECTIONS, HARDWARE)
    if ROW:
        _store(row_ptr, code, m, k, row_stride, row_mask)
        tl.store(row_scale_ptr + corner, scale)
    if COL:
        _store(col_ptr, tl.trans(code), k, m, col_stride, col_mask)
        tl.store(col_scale_ptr + corner, scale)


@triton.jit
def block_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
    M, K, x_stride, row_stride, col_stride, row_scale_stride, col_scale_stride,
    ROW: tl.constexpr, COL: tl.constexpr, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """128×128 blocks in both orientations, each in its own format (0, 4 or 8); an equal one is rounded once."""
    k, m = tl.program_id(0), tl.program_id(1)
    x, _, _, row_mask, col_mask = _part(x_ptr, x_stride, M, K, m, k)
    amax = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    row_scale = row_scale_ptr + m * row_scale_stride + k
    col_scale = col_scale_ptr + k * col_scale_stride + m
    if (ROW == 8) or (COL == 8):
        _block_side(
            x, amax, row_ptr, col_ptr, row_scale, col_scale, m, k, row_stride, col_stride, row_mask, col_mask,
            8, ROW == 8, COL == 8, CORRECTIONS, HARDWARE,
        )  # fmt: skip
    if (ROW == 4) or (COL == 4):
        _block_side(
            x, amax, row_ptr, col_ptr, row_scale, col_scale, m, k, row_stride, col_stride, row_mask, col_mask,
            4, ROW == 4, COL == 4, CORRECTIONS, HARDWARE,
        )  # fmt: skip


@triton.jit
def amax_kernel(x_ptr, amax_ptr, M, K, x_stride, PARTS: tl.constexpr):
    """Bits of max|x| into ``amax_ptr`` (int32, zero before); a program reads ``PARTS`` parts along K."""
    m = tl.program_id(1)
    largest = tl.zeros((EDGE,), tl.int32)
    for part in tl.static_range(PARTS):
        x, _, _, _, _ = _part(x_ptr, x_stride, M, K, m, tl.program_id(0) * PARTS + part)
        largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    tl.atomic_max(amax_ptr, tl.max(largest, axis=0))


@triton.jit
def tensor_kernel(
    x_ptr, amax_ptr, row_ptr, col_ptr, scale_ptr, M, K, x_stride, row_stride, col_stride,
    ROW: tl.constexpr, COL: tl.constexpr, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """fp8_tensor: every program divides by the same scale; the first one stores it."""
    k, m = tl.program_id(0), tl.program_id(1)
    x, _, _, row_mask, col_mask = _part(x_ptr, x_stride, M, K, m, k)
    one = tl.zeros((1, 1), tl.int32)
    scale = tile_scale(tl.load(amax_ptr + one), 8, 0, HARDWARE)
    tl.store(scale_ptr + one, scale, mask=(one + k + m) == 0)
    code = encode(x, scale, x.to(tl.int32, bitcast=True), 8, False, CORRECTIONS, HARDWARE)
    if ROW:
        _store(row_ptr, code, m, k, row_stride, row_mask)
    if COL:
        _store(col_ptr, tl.trans(code), k, m, col_stride, col_mask)
