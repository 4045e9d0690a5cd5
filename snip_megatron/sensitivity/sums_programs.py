# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of the statistics: sums of squared quantisation errors.

The errors may differ from those of the quantisers in the last bit: at a tie both neighbours are equally far, so a
quotient that is off by a rounding changes a sum by as little. Only sums are stored.
"""

import triton
import triton.language as tl

EDGE = tl.constexpr(128)
_EXPONENT = tl.constexpr(0x7F800000)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def _scale(amax, FORMAT: tl.constexpr):
    """Return amax / the format's maximum, at least 2^-100 (squares underflow below), and 1 for a zero tile."""
    maximum: tl.constexpr = 6.0 if FORMAT == 4 else 448.0
    return tl.where(amax == 0.0, 1.0, tl.maximum(amax / maximum, _SMALLEST_SCALE))


@triton.jit
def _error(y, FORMAT: tl.constexpr):
    """Return (rounded y − y, spacing of numbers at y) in E2M1 (``FORMAT`` 4) or E4M3 (8), for y = x / scale.

    Adding and subtracting 1.5·2^23 spacings rounds to nearest.
    """
    least: tl.constexpr = 127 << 23 if FORMAT == 4 else 121 << 23
    magic: tl.constexpr = 1.5 * 2.0**22 if FORMAT == 4 else 1.5 * 2.0**20
    bits = tl.maximum(y.to(tl.int32, bitcast=True) & _EXPONENT, least)
    power = bits.to(tl.float32, bitcast=True)
    return (y + power * magic) - power * magic - y, power * (0.5 if FORMAT == 4 else 0.125)


@triton.jit
def _squared(error, spacing, RANDOM: tl.constexpr):
    """Return the square of the error, or with ``RANDOM`` its expectation under stochastic rounding."""
    if RANDOM:
        distance = tl.abs(error)
        return distance * (spacing - distance)
    else:
        return error * error


@triton.jit
def _load(x_ptr, x_stride, M, K, m, k, ROWS: tl.constexpr):
    """Load part (m, k) [ROWS, 128] in FP32. Zeros outside the matrix."""
    i, j = m * ROWS + tl.arange(0, ROWS), k * EDGE + tl.arange(0, EDGE)
    pointers = x_ptr + i.to(tl.int64)[:, None] * x_stride + j[None, :]
    return tl.load(pointers, mask=(i < M)[:, None] & (j < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _format_sums(
    x, row_amax, col_amax, whole_amax_ptr, errors_ptr, cols_ptr, col_mask,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """Store a candidate's total with tiles along rows, and its column sums with tiles along columns."""
    j = tl.arange(0, EDGE)
    if WHOLE:
        scale = _scale(tl.load(whole_amax_ptr), FORMAT)
        error, spacing = _error(x * (1.0 / scale), FORMAT)
        sums = tl.sum(_squared(error, spacing, RANDOM), axis=0) * (scale * scale)
        tl.store(cols_ptr + j, sums, mask=col_mask)
        tl.store(errors_ptr, tl.sum(sums, axis=0))
    else:
        scale = _scale(row_amax, FORMAT)
        error, spacing = _error(x * (1.0 / scale)[:, None], FORMAT)
        tl.store(errors_ptr, tl.sum(tl.sum(_squared(error, spacing, RANDOM), axis=1) * (scale * scale), axis=0))
        scale = _scale(col_amax, FORMAT)
        error, spacing = _error(x * (1.0 / scale)[None, :], FORMAT)
        tl.store(cols_ptr + j, tl.sum(_squared(error, spacing, RANDOM), axis=0) * (scale * scale), mask=col_mask)


@triton.jit(do_not_specialize=["M"])  # experts have any number of tokens
def tensor_kernel(
    x_ptr, rows_ptr, cols_ptr, errors_ptr, amax_ptr, K, x_stride, M,
    PLACE_8: tl.constexpr, PLACE_4: tl.constexpr, PLACE_WHOLE: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """Sum one 128×128 part.

    ``rows`` [parts of K, M] are sums of x². ``cols`` [1 + formats, parts of M, K] start with those of x². ``errors`` is
    [formats, parts]. ``PLACE_*`` is the index of a format among the candidates, −1 if it is none. ``RANDOM``: E2M1
    rounds stochastically.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(0) * tl.num_programs(1)
    x = _load(x_ptr, x_stride, M, K, m, k, EDGE)
    i = tl.arange(0, EDGE)
    row_mask, col_mask = m * EDGE + i < M, k * EDGE + i < K
    squares = x * x
    tl.store(rows_ptr + k.to(tl.int64) * M + m * EDGE + i, tl.sum(squares, axis=1), mask=row_mask)
    cols_ptr += m.to(tl.int64) * K + k * EDGE
    place = tl.num_programs(1).to(tl.int64) * K
    tl.store(cols_ptr + i, tl.sum(squares, axis=0), mask=col_mask)
    magnitude = tl.abs(x)
    row_amax, col_amax = tl.max(magnitude, axis=1), tl.max(magnitude, axis=0)
    errors_ptr += m * tl.num_programs(0) + k
    if PLACE_8 >= 0:
        _format_sums(
            x, row_amax, col_amax, amax_ptr, errors_ptr + PLACE_8 * parts, cols_ptr + (PLACE_8 + 1) * place, col_mask,
            8, False, False,
        )  # fmt: skip
    if PLACE_4 >= 0:
        _format_sums(
            x, row_amax, col_amax, amax_ptr, errors_ptr + PLACE_4 * parts, cols_ptr + (PLACE_4 + 1) * place, col_mask,
            4, False, RANDOM,
        )  # fmt: skip
    if PLACE_WHOLE >= 0:
        _format_sums(
            x, row_amax, col_amax, amax_ptr, errors_ptr + PLACE_WHOLE * parts, cols_ptr + (PLACE_WHOLE + 1) * place,
            col_mask, 8, True, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def dots_kernel(
    x_ptr, d_ptr, dots_ptr, amax_ptr, K, x_stride, d_stride, M,
    PLACE_8: tl.constexpr, PLACE_4: tl.constexpr, PLACE_WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Inner products of rows over 128 columns. A program takes ``ROWS`` rows.

    ``dots`` [1 + formats, parts of K, M] holds d·x, then d·δx of each format with tiles along rows.
    """
    k, m = tl.program_id(0), tl.program_id(1)
    x, d = _load(x_ptr, x_stride, M, K, m, k, ROWS), _load(d_ptr, d_stride, M, K, m, k, ROWS)
    i = m * ROWS + tl.arange(0, ROWS)
    dots_ptr += k.to(tl.int64) * M
    place = tl.num_programs(0).to(tl.int64) * M
    tl.store(dots_ptr + i, tl.sum(x * d, axis=1), mask=i < M)
    amax = tl.max(tl.abs(x), axis=1)
    for FORMAT in tl.static_range(4, 9, 4):
        if (PLACE_8 if FORMAT == 8 else PLACE_4) >= 0:
            scale = _scale(amax, FORMAT)
            error, _ = _error(x * (1.0 / scale)[:, None], FORMAT)
            sums = tl.sum(error * d, axis=1) * scale
            tl.store(dots_ptr + (1 + (PLACE_8 if FORMAT == 8 else PLACE_4)) * place + i, sums, mask=i < M)
    if PLACE_WHOLE >= 0:
        scale = _scale(tl.load(amax_ptr), 8)
        error, _ = _error(x * (1.0 / scale), 8)
        tl.store(dots_ptr + (1 + PLACE_WHOLE) * place + i, tl.sum(error * d, axis=1) * scale, mask=i < M)


@triton.jit
def weight_kernel(
    w_ptr, sums_ptr, amax_ptr, N, K, w_stride,
    PLACE_8: tl.constexpr, PLACE_4: tl.constexpr, PLACE_WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum one 128×128 block: ``sums`` [1 + formats, blocks] holds w², then the squared error of each format."""
    k, n = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(0) * tl.num_programs(1)
    w = _load(w_ptr, w_stride, N, K, n, k, EDGE)
    sums_ptr += n * tl.num_programs(0) + k
    tl.store(sums_ptr, tl.sum(tl.sum(w * w, axis=1), axis=0))
    amax = tl.max(tl.max(tl.abs(w), axis=1), axis=0)
    for FORMAT in tl.static_range(4, 9, 4):
        if (PLACE_8 if FORMAT == 8 else PLACE_4) >= 0:
            scale = _scale(amax, FORMAT)
            error, _ = _error(w * (1.0 / scale), FORMAT)
            total = tl.sum(tl.sum(error * error, axis=1), axis=0)
            tl.store(sums_ptr + (1 + (PLACE_8 if FORMAT == 8 else PLACE_4)) * blocks, total * scale * scale)
    if PLACE_WHOLE >= 0:
        scale = _scale(tl.load(amax_ptr), 8)
        error, _ = _error(w * (1.0 / scale), 8)
        total = tl.sum(tl.sum(error * error, axis=1), axis=0)
        tl.store(sums_ptr + (1 + PLACE_WHOLE) * blocks, total * scale * scale)
