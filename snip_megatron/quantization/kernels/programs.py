# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of the quantisers: each program quantises one 128×128 part of a matrix.

A kernel that is compiled with ``GUARDED`` returns at once where ``current_ptr`` holds another number than zero.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.elements import (
    bytes_of,
    decode,
    lift_of,
    nearest_e2m1,
    quotient,
    tile_scale,
)
from snip_megatron.quantization.kernels.pairs import (
    EDGE,
    NO_POLICY,
    PAIRS,
    amax_pairs,
    lifted,
    load_pairs,
    numbers,
    over_rows,
    sign_words,
    store_columns,
    store_rows,
)
from snip_megatron.quantization.kernels.stochastic import random_pairs, stochastic_bytes

MAXIMA = tl.constexpr(512)
"""Largest number of maxima from which a quantiser finds the amax of a matrix, and of programs that find them: four on
each of an H200's 132 multiprocessors would be 528."""
_RANDOM_ARGUMENTS = ["row_start", "col_start", *(f"{side}_word_{i}" for side in ("row", "col") for i in range(2))]


@triton.jit
def global_ids(ids_ptr, start, index, mask, GIVEN: tl.constexpr):
    """Return global ids of the local ``index``: loaded if ``GIVEN``, otherwise counted from ``start``."""
    if GIVEN:
        ids = tl.load(ids_ptr + index, mask=mask, other=0)
    else:
        ids = index + start
    return ids


@triton.jit
def _encode(
    a, b, lo_scale, hi_scale, lo_bits, hi_bits,
    FORMAT: tl.constexpr, RANDOM: tl.constexpr, JOIN: tl.constexpr,
    DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return the E4M3 bytes of a part, divided by scales that broadcast.

    With ``JOIN`` returns joined pairs (int16, twice); otherwise even and odd columns (uint8).
    """
    lo_lift, hi_lift = lift_of(lo_scale), lift_of(hi_scale)
    if (DTYPE == "fp32") and not RANDOM:
        lo, hi = numbers(a, b, DTYPE, WORDS)
    else:
        lo, hi = lifted(a, b, lo_lift, hi_lift, DTYPE, WORDS, HARDWARE)
    if RANDOM:
        words = sign_words(a, lo, hi, WORDS)
        return stochastic_bytes(
            words, lo, hi, lo_scale, hi_scale, lo_lift, hi_lift, lo_bits, hi_bits, JOIN, DTYPE, HARDWARE
        )
    else:
        lo = quotient(lo, lo_scale, lo_lift, DTYPE, HARDWARE)
        hi = quotient(hi, hi_scale, hi_lift, DTYPE, HARDWARE)
        if FORMAT == 4:
            lo, hi = nearest_e2m1(lo, DTYPE, HARDWARE), nearest_e2m1(hi, DTYPE, HARDWARE)
        return bytes_of(lo, hi, JOIN, HARDWARE)


@triton.jit
def _store_sums(ptr, lo, hi, lo_mask, hi_mask):
    """Store column sums of squares of the even and odd columns of a part."""
    j = 2 * tl.arange(0, PAIRS)
    lo, hi = lo * lo, hi * hi
    if len(lo.shape) == 3:
        lo, hi = tl.sum(lo, axis=2), tl.sum(hi, axis=2)
    lo, hi = tl.sum(lo, axis=0), tl.sum(hi, axis=0)
    tl.store(ptr + j, lo, mask=lo_mask)
    tl.store(ptr + j + 1, hi, mask=hi_mask)


@triton.jit
def quantize_side(
    a, b, lo_amax, hi_amax, row_ids, lo_ids, hi_ids, word_0, word_1, out_ptr, out_stride, scale_ptr, m, k,
    row_mask, lo_mask, hi_mask, sum_ptr, sum_stride,
    AXIS: tl.constexpr, FORMAT: tl.constexpr, STORE: tl.constexpr, SUM: tl.constexpr, RANDOM: tl.constexpr,
    PAIRED: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise a part in one format, with tiles along columns (``AXIS`` 1) or along rows (``AXIS`` 0, stored
    transposed).

    The amax arguments hold FP32 bits, one per tile. ``SUM`` is the candidate's index in the sums of squared errors,
    tiles along columns first; 0 means no sums.
    """
    lo_scale = tile_scale(lo_amax, FORMAT, HARDWARE, DTYPE == "fp32")
    hi_scale = tile_scale(hi_amax, FORMAT, HARDWARE, DTYPE == "fp32")
    lo_wide, hi_wide = lo_scale[:, None], hi_scale[:, None]
    if AXIS == 0:
        lo_wide, hi_wide = over_rows(lo_scale, True), over_rows(hi_scale, True)
    lo_bits, hi_bits = a, b
    if RANDOM:
        lo_bits, hi_bits = random_pairs(row_ids, lo_ids, hi_ids, word_0, word_1, AXIS == 0, PAIRED)
    codes, others = _encode(a, b, lo_wide, hi_wide, lo_bits, hi_bits, FORMAT, RANDOM, AXIS == 1, DTYPE, WORDS, HARDWARE)
    if STORE:
        if AXIS == 1:
            store_rows(out_ptr, codes, m, k, out_stride, row_mask)
            tl.store(scale_ptr + tl.arange(0, EDGE), lo_scale, mask=row_mask)
        else:
            store_columns(out_ptr, codes, others, m, k, out_stride, lo_mask, hi_mask)
            j = 2 * tl.arange(0, PAIRS)
            tl.store(scale_ptr + j, lo_scale, mask=lo_mask)
            tl.store(scale_ptr + j + 1, hi_scale, mask=hi_mask)
    if SUM > 0:
        lo, hi = numbers(a, b, DTYPE, WORDS)
        lo_value, hi_value = decode(codes, others, AXIS == 1, HARDWARE)
        sum_ptr += (SUM + 1 - AXIS) * sum_stride
        _store_sums(sum_ptr, lo_value * lo_wide - lo, hi_value * hi_wide - hi, lo_mask, hi_mask)


@triton.jit(do_not_specialize=_RANDOM_ARGUMENTS)
def tile_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, sums_ptr, rows_ptr, cols_ptr, row_key_ptr, col_key_ptr,
    M, K, width, col_stride, row_start, col_start,
    row_word_0, row_word_1, col_word_0, col_word_1,
    x_stride: tl.constexpr, row_stride: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_RANDOM: tl.constexpr, COL_RANDOM: tl.constexpr, LOADED: tl.constexpr,
    SUMS: tl.constexpr, SUM_8: tl.constexpr, SUM_4: tl.constexpr, GIVEN_ROWS: tl.constexpr, GIVEN_COLS: tl.constexpr,
    PAIRED: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise 1×128 tiles along K and along M, and sum x² and squared errors over columns.

    ``ROW`` and ``COL`` are the formats of the two operands: 4, 8, or 0 for none. ``width`` and ``x_stride`` count
    elements of ``x_ptr``, ``row_stride`` counts pairs of bytes. ``SUM_8`` and ``SUM_4`` are the indices of the
    candidates in ``sums`` [indices, parts of M, K]; 0 means no sums.
    With ``LOADED`` the key words are loaded from memory instead of passed as arguments.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    rows, cols = m * EDGE + tl.arange(0, EDGE), k * EDGE + 2 * tl.arange(0, PAIRS)
    row_mask, lo_mask, hi_mask = rows < M, cols < K, cols + 1 < K
    row_ids, lo_ids, hi_ids = rows, cols, cols
    if ROW_RANDOM or COL_RANDOM:
        row_ids = global_ids(rows_ptr, row_start, rows, row_mask, GIVEN_ROWS)
        lo_ids = global_ids(cols_ptr, col_start, cols, lo_mask, GIVEN_COLS)
        hi_ids = lo_ids if PAIRED else global_ids(cols_ptr, col_start, cols + 1, hi_mask, GIVEN_COLS)
    if LOADED:
        if ROW_RANDOM:
            row_word_0, row_word_1 = tl.load(row_key_ptr), tl.load(row_key_ptr + 1)
        if COL_RANDOM:
            col_word_0, col_word_1 = tl.load(col_key_ptr), tl.load(col_key_ptr + 1)
    place = tl.num_programs(1).to(tl.int64) * K
    sum_ptr = sums_ptr + m.to(tl.int64) * K + k * EDGE
    if (ROW > 0) or SUMS:
        a, b = load_pairs(x_ptr, x_stride, M, width, m, k, False, WORDS)
        lo_amax, hi_amax = amax_pairs(a, b, False, DTYPE, WORDS, HARDWARE)
        amax = tl.maximum(lo_amax, hi_amax)
        scale_ptr = row_scale_ptr + k.to(tl.int64) * M + m * EDGE
        for FORMAT in tl.static_range(4, 9, 4):
            if (ROW == FORMAT) or ((SUM_8 if FORMAT == 8 else SUM_4) > 0):
                quantize_side(
                    a, b, amax, amax, row_ids, lo_ids, hi_ids, row_word_0, row_word_1,
                    row_ptr, row_stride, scale_ptr, m, k, row_mask, lo_mask, hi_mask, sum_ptr, place,
                    1, FORMAT, ROW == FORMAT, SUM_8 if FORMAT == 8 else SUM_4, ROW_RANDOM and (FORMAT == 4),
                    PAIRED, DTYPE, WORDS, HARDWARE,
                )  # fmt: skip
    if (COL > 0) or SUMS:
        a, b = load_pairs(x_ptr, x_stride, M, width, m, k, True, WORDS)
        lo_amax, hi_amax = amax_pairs(a, b, True, DTYPE, WORDS, HARDWARE)
        scale_ptr = col_scale_ptr + m.to(tl.int64) * K + k * EDGE
        if SUMS:
            lo, hi = numbers(a, b, DTYPE, WORDS)
            _store_sums(sum_ptr, lo, hi, lo_mask, hi_mask)
        for FORMAT in tl.static_range(4, 9, 4):
            if (COL == FORMAT) or ((SUM_8 if FORMAT == 8 else SUM_4) > 0):
                quantize_side(
                    a, b, lo_amax, hi_amax, row_ids, lo_ids, hi_ids, col_word_0, col_word_1,
                    col_ptr, col_stride, scale_ptr, m, k, row_mask, lo_mask, hi_mask, sum_ptr, place,
                    0, FORMAT, COL == FORMAT, SUM_8 if FORMAT == 8 else SUM_4, COL_RANDOM and (FORMAT == 4),
                    PAIRED, DTYPE, WORDS, HARDWARE,
                )  # fmt: skip


@triton.jit
def _uniform_side(
    a, b, scale, out_ptr, M, K, m, k, out_stride, FORMAT: tl.constexpr, DOWN: tl.constexpr, EVICTION: tl.constexpr,
    DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise a part with one scale [1, 1], and store it as it lies, or transposed if it was loaded with ``DOWN``."""
    if DOWN:
        scale = scale[None, :, :]
    codes, others = _encode(a, b, scale, scale, a, b, FORMAT, False, not DOWN, DTYPE, WORDS, HARDWARE)
    if DOWN:
        cols = k * EDGE + 2 * tl.arange(0, PAIRS)
        store_columns(out_ptr, codes, others, m, k, out_stride, cols < K, cols + 1 < K, EVICTION)
    else:
        store_rows(out_ptr, codes, m, k, out_stride, m * EDGE + tl.arange(0, EDGE) < M, EVICTION)


@triton.jit
def block_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, current_ptr,
    M, K, width, col_stride, row_scale_stride, col_scale_stride, x_stride: tl.constexpr, row_stride: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, GUARDED: tl.constexpr,
    DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise 128×128 blocks in both orientations, each in its own format (0, 4 or 8)."""
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    k, m = tl.program_id(0), tl.program_id(1)
    a, b = load_pairs(x_ptr, x_stride, M, width, m, k, False, WORDS)
    lo_amax, hi_amax = amax_pairs(a, b, False, DTYPE, WORDS, HARDWARE)
    corner = tl.zeros((1, 1), tl.int32)
    amax = corner + tl.max(tl.maximum(lo_amax, hi_amax), axis=0)
    if ROW:
        scale = tile_scale(amax, ROW, HARDWARE, DTYPE == "fp32")
        codes, _ = _encode(a, b, scale, scale, a, b, ROW, False, True, DTYPE, WORDS, HARDWARE)
        store_rows(row_ptr, codes, m, k, row_stride, m * EDGE + tl.arange(0, EDGE) < M)
        tl.store(row_scale_ptr + m * row_scale_stride + k + corner, scale)
    if COL:
        scale = tile_scale(amax, COL, HARDWARE, DTYPE == "fp32")
        a, b = load_pairs(x_ptr, x_stride, M, width, m, k, True, WORDS)
        _uniform_side(a, b, scale, col_ptr, M, K, m, k, col_stride, COL, True, "", DTYPE, WORDS, HARDWARE)
        tl.store(col_scale_ptr + k * col_scale_stride + m + corner, scale)


@triton.jit
def amax_kernel(
    x_ptr, maxima_ptr, current_ptr, M, width, x_stride: tl.constexpr,
    GUARDED: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store the bits of max|x| over the parts of each program to ``maxima_ptr`` (int32), in the order of programs.

    Together the programs read the matrix from its beginning to its end.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    across, part = tl.cdiv(width, PAIRS if WORDS else EDGE), tl.program_id(0)
    largest = tl.zeros((EDGE,), tl.int32)
    while part < across * tl.cdiv(M, EDGE):  # the interpreter has no range of tensors
        a, b = load_pairs(x_ptr, x_stride, M, width, part // across, part % across, False, WORDS)
        lo, hi = amax_pairs(a, b, False, DTYPE, WORDS, HARDWARE)
        largest = tl.maximum(largest, tl.maximum(lo, hi))
        part += tl.num_programs(0)
    tl.store(maxima_ptr + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["count"])
def tensor_kernel(
    x_ptr, maxima_ptr, row_ptr, col_ptr, scale_ptr, current_ptr, M, K, width, col_stride, count,
    x_stride: tl.constexpr, row_stride: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, GUARDED: tl.constexpr,
    DESCENDING: tl.constexpr, LAST_READ: tl.constexpr, WRITE: tl.constexpr,
    DTYPE: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise to fp8_tensor by the largest of ``count`` maxima. The first part's program stores the scale.

    With ``DESCENDING`` parts are processed from the last to the first, because the end of the matrix is what the kernel
    before it has left in cache. ``LAST_READ`` and ``WRITE`` are Triton's policies for the caches.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    k, m = tl.program_id(0), tl.program_id(1)
    if DESCENDING:
        k, m = tl.num_programs(0) - 1 - k, tl.num_programs(1) - 1 - m
    # The part is on its way while the amax is found.
    a, b = load_pairs(x_ptr, x_stride, M, width, m, k, not ROW, WORDS, NO_POLICY if ROW and COL else LAST_READ)
    i, one = tl.arange(0, MAXIMA), tl.zeros((1, 1), tl.int32)
    amax = tl.max(tl.load(maxima_ptr + i, mask=i < count, other=0), axis=0)
    scale = tile_scale(amax + one, 8, HARDWARE, True)
    tl.store(scale_ptr + one, scale, mask=(one + k + m) == 0)
    if ROW:
        _uniform_side(a, b, scale, row_ptr, M, K, m, k, row_stride, 8, False, WRITE, DTYPE, WORDS, HARDWARE)
    if COL:
        if ROW:
            a, b = load_pairs(x_ptr, x_stride, M, width, m, k, True, WORDS, LAST_READ)
        _uniform_side(a, b, scale, col_ptr, M, K, m, k, col_stride, 8, True, WRITE, DTYPE, WORDS, HARDWARE)
