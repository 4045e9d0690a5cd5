# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Kernels of the tile quantisers: each program quantises one 128×128 part of a matrix. Keys of stochastic rounding.

A kernel that is compiled with ``GUARDED`` returns at once where ``current_ptr`` holds another number than zero.
"""

import triton
import triton.language as tl

from snip_megatron.numerics.quantize.kernels.device import (
    EDGE,
    HALF,
    PAIRS,
    amax_pairs,
    broadcast_over_rows,
    e4m3_bytes,
    lift_pairs,
    load_pairs,
    nearest_e2m1,
    pair_draws,
    quotient,
    scale_lift,
    stochastic_bytes,
    store_columns,
    store_rows,
    tile_scale,
)

MAXIMA = tl.constexpr(512)
"""Largest number of programs of ``amax_kernel``, and of maxima that ``tensor_kernel`` reduces: a power of two, about
four programs for each of an H200's 132 multiprocessors."""
_RANDOM_ARGUMENTS = ["first_row", *(f"{side}_word_{i}" for side in ("row", "col") for i in range(2))]


@triton.jit
def global_ids(ids_ptr, cols, lo_mask, hi_mask, PAIRED: tl.constexpr):
    """Return the global ids of the columns ``cols`` and of their right neighbours."""
    lo = tl.load(ids_ptr + cols, mask=lo_mask, other=0)
    if PAIRED:
        return lo, lo
    else:
        return lo, tl.load(ids_ptr + cols + 1, mask=hi_mask, other=0)


@triton.jit
def _e4m3_codes(
    words, lo_scale, hi_scale, lo_bits, hi_bits,
    FORMAT: tl.constexpr, RANDOM: tl.constexpr, JOIN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return the E4M3 bytes of a part, divided by scales that broadcast, as :func:`e4m3_bytes` does."""
    lo_lift, hi_lift = scale_lift(lo_scale), scale_lift(hi_scale)
    lo, hi = lift_pairs(words, lo_lift, hi_lift, HARDWARE)
    if RANDOM:
        return stochastic_bytes(words, lo, hi, lo_scale, hi_scale, lo_lift, hi_lift, lo_bits, hi_bits, JOIN, HARDWARE)
    else:
        lo, hi = quotient(lo, lo_scale, lo_lift, HARDWARE), quotient(hi, hi_scale, hi_lift, HARDWARE)
        if FORMAT == 4:
            lo, hi = nearest_e2m1(lo, HARDWARE), nearest_e2m1(hi, HARDWARE)
        return e4m3_bytes(lo, hi, JOIN, HARDWARE)


@triton.jit
def quantize_side(
    words, lo_amax, hi_amax, row_ids, lo_ids, hi_ids, word_0, word_1, out_ptr, out_stride, scale_ptr, m, k,
    row_mask, lo_mask, hi_mask,
    AXIS: tl.constexpr, FORMAT: tl.constexpr, RANDOM: tl.constexpr, PAIRED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise a part with tiles along columns (``AXIS`` 1), or with tiles along rows, and store it transposed (0)."""
    lo_scale, hi_scale = tile_scale(lo_amax, FORMAT, HARDWARE), tile_scale(hi_amax, FORMAT, HARDWARE)
    lo_wide, hi_wide = lo_scale[:, None], hi_scale[:, None]
    if AXIS == 0:
        lo_wide, hi_wide = broadcast_over_rows(lo_scale, True), broadcast_over_rows(hi_scale, True)
    lo_bits, hi_bits = words, words
    if RANDOM:
        lo_bits, hi_bits = pair_draws(row_ids, lo_ids, hi_ids, word_0, word_1, AXIS == 0, PAIRED)
    codes, right_codes = _e4m3_codes(words, lo_wide, hi_wide, lo_bits, hi_bits, FORMAT, RANDOM, AXIS == 1, HARDWARE)
    if AXIS == 1:
        store_rows(out_ptr, codes, m, k, out_stride, row_mask)
        tl.store(scale_ptr + tl.arange(0, EDGE), lo_scale, mask=row_mask)
    else:
        store_columns(out_ptr, codes, right_codes, m, k, out_stride, lo_mask, hi_mask)
        j = 2 * tl.arange(0, PAIRS)
        tl.store(scale_ptr + j, lo_scale, mask=lo_mask)
        tl.store(scale_ptr + j + 1, hi_scale, mask=hi_mask)


@triton.jit
def quantize_both(
    words, x_ptr, x_stride, width, cols_ptr, row_key_ptr, col_key_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
    M, K, m, k, row_stride, col_stride, first_row, row_word_0, row_word_1, col_word_0, col_word_1,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_RANDOM: tl.constexpr, COL_RANDOM: tl.constexpr, LOADED: tl.constexpr,
    PAIRED: tl.constexpr, TWICE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise part (m, k) of a matrix [M, K] with tiles along K (``ROW``) and along M (``COL``).

    ``words`` [128, 64] are the part of a matrix with whole tiles along K. With ``TWICE`` each side loads it from x.
    """
    rows, cols = m * EDGE + tl.arange(0, EDGE), k * EDGE + 2 * tl.arange(0, PAIRS)
    row_mask, lo_mask = rows < M, cols < K
    hi_mask = cols + 1 < K if TWICE else lo_mask
    row_ids, lo_ids, hi_ids = rows + first_row, cols, cols
    if ROW_RANDOM or COL_RANDOM:
        lo_ids, hi_ids = global_ids(cols_ptr, cols, lo_mask, hi_mask, PAIRED)
    if LOADED:
        if ROW_RANDOM:
            row_word_0, row_word_1 = tl.load(row_key_ptr), tl.load(row_key_ptr + 1)
        if COL_RANDOM:
            col_word_0, col_word_1 = tl.load(col_key_ptr), tl.load(col_key_ptr + 1)
    if ROW:
        part = load_pairs(x_ptr, x_stride, M, width, m, k, False) if TWICE else words
        lo_amax, hi_amax = amax_pairs(part, False, HARDWARE)
        amax = tl.maximum(lo_amax, hi_amax)
        quantize_side(
            part, amax, amax, row_ids, lo_ids, hi_ids, row_word_0, row_word_1, row_ptr, row_stride,
            row_scale_ptr + k.to(tl.int64) * M + m * EDGE, m, k, row_mask, lo_mask, hi_mask,
            1, ROW, ROW_RANDOM, PAIRED, HARDWARE,
        )  # fmt: skip
    if COL:
        if TWICE:
            columns_part = load_pairs(x_ptr, x_stride, M, width, m, k, True)
        else:  # the layout of a part that is loaded with DOWN
            columns_part = tl.permute(tl.reshape(words, (2, HALF, PAIRS)), (1, 2, 0))
        lo_amax, hi_amax = amax_pairs(columns_part, True, HARDWARE)
        quantize_side(
            columns_part, lo_amax, hi_amax, row_ids, lo_ids, hi_ids, col_word_0, col_word_1, col_ptr, col_stride,
            col_scale_ptr + m.to(tl.int64) * K + k * EDGE, m, k, row_mask, lo_mask, hi_mask,
            0, COL, COL_RANDOM, PAIRED, HARDWARE,
        )  # fmt: skip


@triton.jit(do_not_specialize=_RANDOM_ARGUMENTS)
def tile_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, cols_ptr, row_key_ptr, col_key_ptr,
    M, K, width, col_stride, first_row, row_word_0, row_word_1, col_word_0, col_word_1,
    x_stride: tl.constexpr, row_stride: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_RANDOM: tl.constexpr, COL_RANDOM: tl.constexpr, LOADED: tl.constexpr,
    PAIRED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise 1×128 tiles along K and along M.

    ``ROW`` and ``COL`` are the formats of the two operands: 4, 8, or 0 for none. ``width`` and ``x_stride`` count words
    of two numbers, ``row_stride`` counts pairs of bytes. With ``LOADED`` the key words are loaded from memory instead
    of passed as arguments.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    quantize_both(
        x_ptr, x_ptr, x_stride, width, cols_ptr, row_key_ptr, col_key_ptr,
        row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, M, K, m, k, row_stride, col_stride,
        first_row, row_word_0, row_word_1, col_word_0, col_word_1,
        ROW, COL, ROW_RANDOM, COL_RANDOM, LOADED, PAIRED, True, HARDWARE,
    )  # fmt: skip


@triton.jit
def _uniform_side(
    words, scale, out_ptr, M, K, m, k, out_stride, FORMAT: tl.constexpr, DOWN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise a part with one scale [1, 1], and store it, transposed if it was loaded with ``DOWN``."""
    if DOWN:
        scale = scale[None, :, :]
    codes, right_codes = _e4m3_codes(words, scale, scale, words, words, FORMAT, False, not DOWN, HARDWARE)
    if DOWN:
        cols = k * EDGE + 2 * tl.arange(0, PAIRS)
        store_columns(out_ptr, codes, right_codes, m, k, out_stride, cols < K, cols + 1 < K)
    else:
        store_rows(out_ptr, codes, m, k, out_stride, m * EDGE + tl.arange(0, EDGE) < M)


@triton.jit(do_not_specialize=["row_scale_stride", "col_scale_stride"])
def block_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, current_ptr,
    M, K, width, x_stride, row_stride, col_stride, row_scale_stride, col_scale_stride,
    ROW: tl.constexpr, COL: tl.constexpr, GROUP: tl.constexpr, GUARDED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise 128×128 blocks in both orientations, each in its format (0, 4 or 8). One kernel serves all widths.

    Groups of ``GROUP``·128 rows are transposed separately; with 0 the matrix is one group.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    k, m = tl.program_id(0), tl.program_id(1)
    words = load_pairs(x_ptr, x_stride, M, width, m, k, False)
    lo_amax, hi_amax = amax_pairs(words, False, HARDWARE)
    corner = tl.zeros((1, 1), tl.int32)
    amax = corner + tl.max(tl.maximum(lo_amax, hi_amax), axis=0)
    if ROW:
        scale = tile_scale(amax, ROW, HARDWARE)
        _uniform_side(words, scale, row_ptr, M, K, m, k, row_stride, ROW, False, HARDWARE)
        tl.store(row_scale_ptr + m * row_scale_stride + k + corner, scale)
    if COL:
        scale = tile_scale(amax, COL, HARDWARE)
        words = load_pairs(x_ptr, x_stride, M, width, m, k, True)
        if GROUP:
            first = m // GROUP * GROUP
            col_ptr += first.to(tl.int64) * EDGE * K
            col_scale_ptr += first * tl.cdiv(K, EDGE)
            m -= first
        _uniform_side(words, scale, col_ptr, M, K, m, k, col_stride, COL, True, HARDWARE)
        tl.store(col_scale_ptr + k * col_scale_stride + m + corner, scale)


@triton.jit
def amax_kernel(
    x_ptr, maxima_ptr, current_ptr, M, width, x_stride: tl.constexpr,
    GUARDED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store the bits of max|x| over the parts of each program to ``maxima_ptr`` (int32), in the order of programs."""
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    across, part = tl.cdiv(width, PAIRS), tl.program_id(0)
    largest = tl.zeros((EDGE,), tl.int32)
    while part < across * tl.cdiv(M, EDGE):  # the interpreter has no range of tensors
        words = load_pairs(x_ptr, x_stride, M, width, part // across, part % across, False)
        lo, hi = amax_pairs(words, False, HARDWARE)
        largest = tl.maximum(largest, tl.maximum(lo, hi))
        part += tl.num_programs(0)
    tl.store(maxima_ptr + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["count"])
def tensor_kernel(
    x_ptr, maxima_ptr, row_ptr, col_ptr, scale_ptr, current_ptr, M, K, width, col_stride, count,
    x_stride: tl.constexpr, row_stride: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, GUARDED: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise to fp8_tensor by the largest of ``count`` maxima. The first part's program stores the scale.

    Parts are processed from the last to the first, because the kernel before it leaves the end of the matrix in cache.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    k, m = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    # The part is loaded while the amax is reduced.
    words = load_pairs(x_ptr, x_stride, M, width, m, k, not ROW)
    i, origin = tl.arange(0, MAXIMA), tl.zeros((1, 1), tl.int32)
    amax = tl.max(tl.load(maxima_ptr + i, mask=i < count, other=0), axis=0)
    scale = tile_scale(amax + origin, 8, HARDWARE, True)
    tl.store(scale_ptr + origin, scale, mask=(origin + k + m) == 0)
    if ROW:
        _uniform_side(words, scale, row_ptr, M, K, m, k, row_stride, 8, False, HARDWARE)
    if COL:
        if ROW:
            words = load_pairs(x_ptr, x_stride, M, width, m, k, True)
        _uniform_side(words, scale, col_ptr, M, K, m, k, col_stride, 8, True, HARDWARE)


# -- rows of experts -------------------------------------------------------------------------------------------------
_WORDS = ["row_word_0", "row_word_1", "col_word_0", "col_word_1"]


@triton.jit
def _source_rows(experts_ptr, table_ptr, EXPERTS, m):
    """Return the row without padding that part m begins with, and the number of its rows that are no padding."""
    expert = tl.load(experts_ptr + m * EDGE)
    place = tl.maximum(expert, 0)
    before = m * EDGE - tl.load(table_ptr + place)
    first = tl.load(table_ptr + EXPERTS + place) + before
    count = tl.load(table_ptr + 2 * EXPERTS + place) - before
    return tl.where(expert < 0, 0, first).to(tl.int64), tl.where(expert < 0, 0, count)


@triton.jit(do_not_specialize=["EXPERTS"])
def row_map_kernel(counts_ptr, experts_ptr, table_ptr, EXPERTS, SIZE: tl.constexpr, BACKWARDS: tl.constexpr):
    """Write where the padded rows of experts are, 128 rows a program: ``RowMap.of_counts``. SIZE ≥ EXPERTS."""
    part, place = tl.program_id(0), tl.arange(0, SIZE)
    inside = place < EXPERTS
    counts = tl.load(counts_ptr + ((EXPERTS - 1 - place) if BACKWARDS else place), mask=inside, other=0).to(tl.int32)
    padded = (counts + EDGE - 1) // EDGE * EDGE
    bounds, upto = tl.cumsum(padded, 0), tl.cumsum(counts, 0)
    expert = tl.sum(((bounds <= part * EDGE) & inside).to(tl.int32), 0)
    expert = tl.where(expert < EXPERTS, expert, -1)
    tl.store(experts_ptr + part * EDGE + tl.arange(0, EDGE), tl.zeros((EDGE,), tl.int32) + expert)
    if part == 0:
        firsts = (tl.sum(counts, 0) - upto) if BACKWARDS else (upto - counts)
        tl.store(table_ptr + place, bounds - padded, mask=inside)
        tl.store(table_ptr + EXPERTS + place, firsts, mask=inside)
        tl.store(table_ptr + 2 * EXPERTS + place, counts, mask=inside)
        tl.store(table_ptr + 3 * EXPERTS + place, bounds, mask=inside)


@triton.jit(do_not_specialize=["EXPERTS"])
def rows_kernel(
    from_ptr, to_ptr, experts_ptr, table_ptr, COLS, EXPERTS,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows. With PAD, rows of the target that have no source become zero."""
    parts: tl.constexpr = EDGE // ROWS
    part = tl.program_id(0) // parts
    first, count = _source_rows(experts_ptr, table_ptr, EXPERTS, part)
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
    first, count = _source_rows(experts_ptr, table_ptr, EXPERTS, m)
    words = load_pairs(x_ptr + (first - m * EDGE) * x_stride, x_stride, m * EDGE + count, K // 2, m, k, False)
    quantize_both(
        words, x_ptr, 0, 0, cols_ptr, row_key_ptr, col_key_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
        M, K, m, k, row_stride, col_stride, 0, row_word_0, row_word_1, col_word_0, col_word_1,
        ROW, COL, ROW_RANDOM, COL_RANDOM, LOADED, PAIRED, False, HARDWARE,
    )  # fmt: skip


# -- keys ------------------------------------------------------------------------------------------------------------
@triton.jit
def _mixed(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _store(words_ptr, state, gemm_mixed):
    key = _mixed(_mixed(state ^ gemm_mixed))
    tl.store(words_ptr, key.to(tl.int32))
    tl.store(words_ptr + 1, (key >> 32).to(tl.int32))


@triton.jit(do_not_specialize=["place"])
def key_kernel(
    state_ptr, counts_ptr, identities_ptr, words_ptr, place, FIRST_MIXED: tl.constexpr, SECOND_MIXED: tl.constexpr
):
    """Write the key words of both GEMMs of the linear at ``place`` and increment its count: ``device_keys.advance``."""
    count = tl.load(counts_ptr + place)
    tl.store(counts_ptr + place, count + 1)
    identity = identities_ptr + 4 * place
    microbatch = count * tl.load(identity + 1) + tl.load(identity + 2)
    state = tl.load(state_ptr).to(tl.uint64, bitcast=True)
    state = _mixed(state ^ _mixed(microbatch.to(tl.uint64, bitcast=True)))
    state = _mixed(state ^ tl.load(identity).to(tl.uint64, bitcast=True))
    _store(words_ptr + 8 * place, state, FIRST_MIXED)
    _store(words_ptr + 8 * place + 4, state, SECOND_MIXED)
