# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of the quantisers: one program reads one 128×128 part of a matrix once and writes what GEMMs need.

Numbers are those of ``rounding.py`` and ``reference.py``. Two paths differ by device, not by result: ``HARDWARE`` uses
the E4M3 conversion instruction (Hopper and later), otherwise bytes are built from the bits of FP32 (the interpreter's
own conversion does not round to even). Quotients are IEEE: ``CORRECTIONS`` > 0 refines x·(1/s) by that many residuals
instead of dividing, which is exact for 16-bit x (see README.md).
"""

import triton
import triton.language as tl

EDGE = tl.constexpr(128)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_RANDOM_ARGUMENTS = ["row_start", "col_start", *(f"{side}_word_{i}" for side in ("row", "col") for i in range(3))]


# -- random bits: rounding.py's hash ---------------------------------------------------------------------------------
@triton.jit
def _mix32(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def random_bits(rows, cols, word, other_word, column_word):
    """uint32 [len(rows), len(cols)]; rows, cols: vectors of global ids; words: ``rounding.key_words`` of the seed."""
    first = _mix32(rows.to(tl.uint32) * 0x9E3779B1 + word.to(tl.uint32))
    second = _mix32(first ^ other_word.to(tl.uint32)) * 0xC2B2AE35  # here, so that an element's step is a multiply-add
    column = _mix32(cols.to(tl.uint32) * 0x85EBCA77 + column_word.to(tl.uint32))
    h = (first[:, None] ^ column[None, :]) * 0x85EBCA6B
    h = (h ^ (h >> 16)) * 0xC2B2AE35 + second[:, None]
    return (h ^ (h >> 15)) * 0x9E3779B1


@triton.jit
def _ids(ids_ptr, start, index, mask, GIVEN: tl.constexpr):
    """Global ids of the local ``index``: looked up, or counted from ``start``."""
    if GIVEN:
        ids = tl.load(ids_ptr + index, mask=mask, other=0)
    else:
        ids = index + start
    return ids


# -- elements --------------------------------------------------------------------------------------------------------
@triton.jit
def _fma(a, b, c, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.fma(a, b, c)
    else:  # the interpreter rounds the product; float64 holds it exactly
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


@triton.jit
def _constant(value: tl.constexpr, x):
    """``value`` in the shape of ``x``: no instruction on a GPU, a tensor for the interpreter."""
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def _negated(x):
    return x * -1.0  # Triton's own minus is 0 − x: an addition, and the wrong zero


@triton.jit
def _reciprocal(x, HARDWARE: tl.constexpr):
    """1/x of a normal number to about half a unit in the last place."""
    if HARDWARE:
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.fma(tl.fma(_negated(x), guess, 1.0), guess, guess)
    else:
        return tl.div_rn(_constant(1.0, x), x)


@triton.jit
def tile_scale(amax_bits, FORMAT: tl.constexpr, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr):
    """FP32 scale, amax / 448 or / 6 in IEEE division, from the bits of max|x|; NaN for NaN or Inf, 1 for zero."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    maximum: tl.constexpr = 448.0 if FORMAT == 8 else 6.0
    inverse: tl.constexpr = 0.002232142857142857 if FORMAT == 8 else 0.16666666666666666
    if CORRECTIONS == 0:
        scale = tl.div_rn(amax, _constant(maximum, amax))
    else:  # the same for all magnitudes of 16-bit formats, FP32's subnormal quotients included (tested one by one)
        scale = amax * inverse
        residual = _fma(scale, _constant(maximum, amax), _negated(amax), HARDWARE)
        scale = _fma(_negated(residual), _constant(inverse, amax), scale, HARDWARE)
    scale = tl.where(amax_bits >= _INFINITY_BITS, float("nan"), scale)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _divide(x, scale, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr):
    """x / scale, rounded as IEEE division; ``scale`` broadcasts (one number a tile). Keeps the sign of a zero."""
    if CORRECTIONS == 0:
        return tl.div_rn(x, scale + tl.zeros_like(x))
    else:
        lift = tl.where(
            scale < 8.673617379884035e-19, 1.2676506002282294e30, 1.0
        )  # 2^-60, 2^100: no subnormal residual
        x = x * lift
        scale = scale * lift
        inverse = _reciprocal(scale, HARDWARE)
        quotient = x * inverse
        for _ in tl.static_range(CORRECTIONS):
            residual = _fma(quotient, scale, _negated(x), HARDWARE)
            quotient = _fma(_negated(residual), inverse, quotient, HARDWARE)
        return quotient


@triton.jit
def _power_below(y, MIN_EXPONENT: tl.constexpr):
    """2^e, the power of two at or below y ≥ 0, not below 2^MIN_EXPONENT; anything for NaN."""
    largest = tl.maximum(y, 2.0**MIN_EXPONENT)
    return (largest.to(tl.int32, bitcast=True) & _INFINITY_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _round_nearest(y, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, HARDWARE: tl.constexpr):
    """y ≥ 0 to the element's grid, ties to even, by adding and subtracting 1.5·2^23 of the local spacing."""
    power = _power_below(y, MIN_EXPONENT)
    magic = _constant(1.5 * 2.0 ** (23 - MANTISSA), y)
    return _fma(power, _negated(magic), _fma(power, magic, y, HARDWARE), HARDWARE)


@triton.jit
def _round_stochastic(y, bits, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, HARDWARE: tl.constexpr):
    """floor(y/step + u)·step for y ≥ 0."""
    power = _power_below(y, MIN_EXPONENT)
    draw = (bits.to(tl.int32, bitcast=True) >> (9 + MANTISSA)).to(tl.float32)
    uniform = draw * (2.0**-23) + 2.0 ** -(MANTISSA + 1)  # u in units of 2^e
    raised = _fma(uniform, power, y, HARDWARE)
    magic = _constant(1.5 * 2.0 ** (23 - MANTISSA), y)
    if HARDWARE:  # rounding the sum down drops everything below the spacing
        lifted = tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [power, magic, raised], dtype=tl.float32, is_pure=True, pack=1
        )
        return _fma(power, _negated(magic), lifted, HARDWARE)
    else:
        step = power * (2.0**-MANTISSA)
        return tl.floor(raised / step) * step


@triton.jit
def _pack_bits(value):
    """The E4M3 byte of an FP32 number that E4M3 holds."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    subnormal = (tl.abs(value) * 512.0).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), subnormal, (magnitude >> 20) - (120 << 3))
    code = tl.where(magnitude > _INFINITY_BITS, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode(
    x, scale, bits, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, CORRECTIONS: tl.constexpr, HARDWARE: tl.constexpr
):
    """E4M3 bytes of x / scale rounded to ``FORMAT`` (8: E4M3, 4: E2M1). The sign of x stays, on zeros too."""
    y = _divide(x, scale, CORRECTIONS, HARDWARE)
    maximum: tl.constexpr = 448.0 if FORMAT == 8 else 6.0
    mantissa: tl.constexpr = 3 if FORMAT == 8 else 1
    min_exponent: tl.constexpr = -6 if FORMAT == 8 else 0
    instruction: tl.constexpr = HARDWARE and (FORMAT == 8) and (not STOCHASTIC)  # it rounds and saturates
    if not instruction:
        y = tl.minimum(tl.abs(y), maximum, propagate_nan=tl.PropagateNan.ALL)
        if STOCHASTIC:
            y = _round_stochastic(y, bits, mantissa, min_exponent, HARDWARE)
        else:
            y = _round_nearest(y, mantissa, min_exponent, HARDWARE)
        sign = x.to(tl.int32, bitcast=True) & -0x80000000
        y = (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _pack_bits(y)


@triton.jit
def decode(code):
    """FP32 of E4M3 bytes (a NaN byte may read as 480: its tile's scale is NaN)."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


# -- kernels ---------------------------------------------------------------------------------------------------------
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
