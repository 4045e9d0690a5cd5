# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that quantises a part of a matrix to bf16 numbers, in one or both orientations, from one load.

A part has as many rows as a tile along rows, so that a thread holds whole columns of it: the maximum of a tile along
rows then needs no other thread, and that of a tile along columns two or four neighbours. A side is computed in the
shape [row tiles, rows of a tile, column tiles, columns of a tile], where scales broadcast. The code needs no
instruction that an Ampere GPU does not have.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.eden import DRAW_STREAM
from snip_megatron.quantization.formats import EDEN_CLIPPING
from snip_megatron.quantization.hadamard import SIGN_STREAM
from snip_megatron.quantization.kernels.elements import lift_of
from snip_megatron.quantization.kernels.stochastic import mix32, truncated_product

_INFINITY_BITS = tl.constexpr(0x7F800000)
_RANDOM_ARGUMENTS = [f"{side}_{name}" for side in ("row", "col") for name in ("word_0", "word_1", "signs")]
_SIGN_STREAM, _DRAW_STREAM = tl.constexpr(SIGN_STREAM), tl.constexpr(DRAW_STREAM)
_EDEN_VALUE = tl.constexpr(6.0 / EDEN_CLIPPING)


@triton.jit
def _load(x_ptr, x_stride, M, K, m, k, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """Return part (m, k) of a matrix as FP32 [R, C], zero outside the matrix. A thread gets ``WIDE`` columns."""
    i, j = tl.arange(0, R), k * C + tl.arange(0, C)
    pointers = x_ptr + m.to(tl.int64) * R * x_stride + i[:, None] * x_stride + j[None, :]
    pointers = tl.max_contiguous(pointers, [1, WIDE])
    x = tl.load(pointers, mask=(m * R + i < M)[:, None] & (j < K)[None, :], other=0.0)
    if x.dtype == tl.bfloat16:  # bf16 is the upper half of FP32; the interpreter's own conversion loses subnormals
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _store(out_ptr, values, M, K, m, k, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    i, j = tl.arange(0, R), k * C + tl.arange(0, C)
    pointers = out_ptr + m.to(tl.int64) * R * K + i[:, None] * K + j[None, :]
    pointers = tl.max_contiguous(pointers, [1, WIDE])
    # The numbers are exact in bf16, so that their upper half is all of them; a NaN stays one.
    halves = (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(pointers, halves, mask=(m * R + i < M)[:, None] & (j < K)[None, :])


@triton.jit
def _sums(x, APART: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Replace each pair (a, b) of rows ``APART`` apart by (a + b, a − b)."""
    pairs = tl.permute(tl.reshape(x, (R // (2 * APART), 2, APART, C)), (0, 2, 3, 1))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
    return tl.reshape(pairs, (R, C))


@triton.jit
def _sums_along(x, APART: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The same for columns."""
    first, second = tl.split(tl.permute(tl.reshape(x, (R, C // (2 * APART), 2, APART)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), (R, C))


@triton.jit
def _signs(signs_ptr, signs, LOADED: tl.constexpr):
    return tl.load(signs_ptr) if LOADED else signs


@triton.jit
def _factors(signs, POINTS: tl.constexpr, SIZE: tl.constexpr):
    """Return ±1 for each of ``SIZE`` rows or columns, in groups of ``POINTS``."""
    places = tl.arange(0, SIZE) & (POINTS - 1)
    if POINTS == 16:
        flips = (signs >> places) & 1
    else:
        flips = (mix32(places.to(tl.uint32) * 0x9E3779B1 + (signs.to(tl.uint32) ^ _SIGN_STREAM)) >> 31).to(tl.int32)
    return (1 - 2 * flips).to(tl.float32)


@triton.jit
def _transformed(x, signs, POINTS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Return the Hadamard transform of groups of rows: the sums of ``hadamard.py`` in the same order."""
    x = x * _factors(signs, POINTS, R)[:, None]
    for i in tl.static_range(4 if POINTS == 16 else 7):
        x = _sums(x, (POINTS // 2) >> i, R, C)
    return x * (0.25 if POINTS == 16 else 0.08838834764831845)  # 1/√16, 1/√128


@triton.jit
def _transformed_along(x, signs, R: tl.constexpr, C: tl.constexpr):
    """Return the transform of groups of 128 columns."""
    x = x * _factors(signs, 128, C)[None, :]
    for i in tl.static_range(7):
        x = _sums_along(x, 64 >> i, R, C)
    return x * 0.08838834764831845


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # integers have the order of the magnitudes, NaN above Inf


@triton.jit
def _largest(tiles):
    """Return the largest integer of each tile of [row tiles, rows, column tiles, columns], with ones for the rest."""
    return tl.max(tl.max(tiles, axis=3, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def _rounded(y, signed, ELEMENT: tl.constexpr):
    """Saturate FP32 y and round it to E2M1 (``ELEMENT`` 4) or E4M3 (8), to nearest, ties to even, with another's sign.

    Adding and subtracting 1.5·2^23 spacings rounds. The spacing is a power of two from the exponent of y.
    """
    maximum: tl.constexpr = 6.0 if ELEMENT == 4 else 448.0
    smallest: tl.constexpr = 127 << 23 if ELEMENT == 4 else 121 << 23  # 1 and 2^-6, the smallest normal numbers
    spacings: tl.constexpr = 1.5 * 2.0**22 if ELEMENT == 4 else 1.5 * 2.0**20
    sign = signed.to(tl.int32, bitcast=True) & -0x80000000
    magnitude = tl.minimum(tl.abs(y), maximum, propagate_nan=tl.PropagateNan.ALL)
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True), smallest) & _INFINITY_BITS
    magic = power.to(tl.float32, bitcast=True) * spacings
    rounded = (magnitude + magic) - magic
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _constant(value: tl.constexpr, x):
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def tensor_scale(amax, SCALING: tl.constexpr, FOUR: tl.constexpr, EDEN: tl.constexpr):
    """Return the FP32 scale of a tensor, amax / 448, amax / (6·448) or, with ``FOUR``, amax / (6·256), as IEEE
    division; 1 if that is zero. With ``EDEN`` the 6 is a little larger.
    """
    value: tl.constexpr = _EDEN_VALUE if EDEN else 6.0
    maximum: tl.constexpr = 448.0 if SCALING == "fp32_tensor" else value * (256.0 if FOUR or EDEN else 448.0)
    scale = tl.div_rn(amax, _constant(maximum, amax))
    scale = tl.where(scale == 0.0, 1.0, scale)
    if SCALING == "fp32_tensor":
        scale = tl.where(_magnitude(amax) >= _INFINITY_BITS, float("nan"), scale)
    return scale


@triton.jit
def _e4m3_scale(amax_bits, whole, MAXIMUM: tl.constexpr):
    """Return (divisor of x, E4M3 scale) of tiles whose amax becomes ``MAXIMUM``."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    of_tile = _rounded(tl.div_rn(tl.div_rn(amax, _constant(MAXIMUM, amax)), tl.zeros_like(amax) + whole), amax, 8)
    of_tile = tl.where(amax_bits < _INFINITY_BITS, of_tile, float("nan"))
    scale = of_tile * whole
    return tl.where(scale == 0.0, float("inf"), scale), of_tile


@triton.jit
def _scales(amax_bits, whole, ELEMENT: tl.constexpr, SCALING: tl.constexpr):
    """Return (divisor of x, factor of a value, that factor where it is stored apart) from the bits of max|x| of tiles.

    ``whole`` is the scale of the tensor.
    """
    finite = amax_bits < _INFINITY_BITS
    amax = amax_bits.to(tl.float32, bitcast=True)
    if SCALING == "fp32_tensor":
        scale = tl.zeros_like(amax) + whole
        return scale, scale
    elif SCALING == "e8m0":  # 2^(floor(log2 amax) − emax), at least 2^-127, which is subnormal
        exponent = tl.maximum((amax_bits >> 23) - (2 if ELEMENT == 4 else 8), 0)
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
        scale = tl.where(finite, tl.where(amax_bits == 0, 1.0, scale), float("nan"))
        return scale, scale
    elif SCALING == "e4m3_fp32":
        return _e4m3_scale(amax_bits, whole, 6.0)
    else:
        scale = tl.div_rn(amax, _constant(6.0 if ELEMENT == 4 else 448.0, amax))
        scale = tl.where(finite, tl.where(scale == 0.0, 1.0, scale), float("nan"))
        return scale, scale


@triton.jit
def _fma(a, b, c, GPU: tl.constexpr):
    if GPU:
        return tl.fma(a, b, c)
    else:  # the interpreter's fma rounds the product; in float64 the product is exact
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


@triton.jit
def _quotient(x, divisor, SCALING: tl.constexpr, GPU: tl.constexpr):
    """Return x / divisor as IEEE division rounds it, with one division for each divisor.

    A product with the reciprocal of a power of two is the quotient. Otherwise the product with the rounded reciprocal
    is corrected once by its residual (P. Markstein, IBM J. Res. Dev. 34, 1990), which gives the rounded quotient. A
    power of two first brings the divisor to [0.5, 1), so that no residual underflows. An infinite divisor gives zero.
    """
    if SCALING == "e8m0":
        bits = divisor.to(tl.int32, bitcast=True)
        inverse = tl.where(bits == 1 << 22, 254 << 23, (254 << 23) - bits).to(tl.float32, bitcast=True)
        return x * tl.where(divisor != divisor, float("nan"), inverse)
    else:
        none = divisor == float("inf")
        lift = tl.where(none, 1.0, lift_of(divisor))
        lifted = tl.where(none, 1.0, divisor * lift)
        inverse = tl.where(none, 0.0, tl.div_rn(_constant(1.0, lifted), lifted))
        x = x * lift
        lifted, inverse = lifted + tl.zeros_like(x), inverse + tl.zeros_like(x)
        quotient = x * inverse
        return _fma(_fma(-1.0 * quotient, lifted, x, GPU), inverse, quotient, GPU)


@triton.jit
def _candidate(tiles, amax_bits, whole, MAXIMUM: tl.constexpr, GPU: tl.constexpr):
    """Return E2M1 values, E4M3 scales and squared errors of tiles whose amax becomes ``MAXIMUM``.

    The sum is one of integers, as in ``reference.py``: no order of additions changes it.
    """
    divisor, factor = _e4m3_scale(amax_bits, whole, MAXIMUM)
    y = _quotient(tiles, divisor, "e4m3_fp32", GPU)
    values = _rounded(y, tiles, 4)
    error = values - y
    steps = (error * error * 1048576.0).to(tl.int32)
    total = tl.sum(tl.sum(steps, axis=3, keep_dims=True), axis=1, keep_dims=True)
    return values, factor, total.to(tl.float32) * factor * factor


@triton.jit
def _four_over_six(tiles, amax_bits, whole, GPU: tl.constexpr):
    """Return E2M1 values and E4M3 scales, where the amax of a tile becomes 6 or 4, by the smaller squared error."""
    values, factor, error = _candidate(tiles, amax_bits, whole, 6.0, GPU)
    others, of_other, error_of_other = _candidate(tiles, amax_bits, whole, 4.0, GPU)
    smaller = (error_of_other < error) | (factor == 0.0)
    return tl.where(smaller, others, values), tl.where(smaller, of_other, factor)


@triton.jit
def _of_group(tiles, ALONG: tl.constexpr):
    """Replace the number of each tile [row tiles, 1, column tiles, 1] by the sum over the tiles of its group.

    With ``ALONG`` groups are eight tiles of a row, otherwise all tiles of a column.
    """
    if ALONG:
        groups = tl.reshape(tiles, (tiles.shape[0], tiles.shape[2] // 8, 8, 1))
        sums = tl.sum(groups, axis=2, keep_dims=True)
        return tl.reshape(tl.broadcast_to(sums, groups.shape), tiles.shape)
    else:
        return tl.broadcast_to(tl.sum(tiles, axis=0, keep_dims=True), tiles.shape)


@triton.jit
def _folded(number):
    return (number ^ (number >> 32)).to(tl.uint32)


@triton.jit
def _eden(tiles, amax_bits, whole, signs, ALONG: tl.constexpr, GPU: tl.constexpr):
    """Return E2M1 values and E4M3 scales of a transformed part: the functions of ``eden.py``."""
    divisor, factor = _e4m3_scale(amax_bits, whole, _EDEN_VALUE)
    y = _quotient(tiles, divisor, "e4m3_fp32", GPU)
    values = _rounded(y, tiles, 4)
    known = amax_bits < _INFINITY_BITS
    y = tl.where(known, tl.minimum(tl.maximum(y, -10.0), 10.0), 0.0)
    weight = (tl.where(known, factor, 0.0) * 512.0).to(tl.int64)
    squares = (y * y * 4096.0).to(tl.int32)
    products = (y * tl.where(known, values, 0.0) * 4096.0).to(tl.int32)
    square = tl.sum(tl.sum(squares, axis=3, keep_dims=True), axis=1, keep_dims=True)
    product = tl.sum(tl.sum(products, axis=3, keep_dims=True), axis=1, keep_dims=True)
    square, product = _of_group(square * weight * weight, ALONG), _of_group(product * weight * weight, ALONG)
    ratio = tl.div_rn(square.to(tl.float32), tl.where(product == 0, 1, product).to(tl.float32))
    scale = tl.minimum(factor * tl.where(product == 0, 1.0, ratio), 448.0)
    h = mix32(_folded(square) + (signs.to(tl.uint32) ^ _DRAW_STREAM))
    h = mix32(_folded(product) + h)
    if ALONG:
        place = (tl.arange(0, tiles.shape[2]) & 7)[None, None, :, None]
    else:
        place = tl.arange(0, tiles.shape[0])[:, None, None, None]
    draws = mix32(place.to(tl.uint32) * 0x9E3779B1 + h)
    # The spacing of E4M3 at the scale, 2^(e − 3) with e ≥ −6, and its reciprocal. The scale has less than 2^24 of their
    # 2^-20th parts, to which the draw is added.
    power = tl.maximum(scale.to(tl.int32, bitcast=True) & _INFINITY_BITS, 121 << 23) - (3 << 23)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    parts = (tl.where(known, scale, 0.0) * tl.where(known, inverse, 1.0) * 1048576.0).to(tl.int32)
    steps = (parts + (draws >> 12).to(tl.int32)) >> 20
    scale = steps.to(tl.float32) * tl.where(known, power.to(tl.float32, bitcast=True), float("nan"))
    return values, scale


@triton.jit
def _stochastic(x, divisor, draws, GPU: tl.constexpr):
    """Multiply x by the reciprocal of its scale and round it to E2M1 stochastically, as ``rounding.py`` does.

    The index of an E2M1 number, 0 to 7, is the upper bits of a count of FP32 numbers in steps of 2^-23 below 1, which
    continues above 1 with the bits of the numbers. The 22 bits below the index are compared with the draw.
    """
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    lift = lift_of(divisor)
    inverse = tl.div_rn(_constant(1.0, divisor), divisor * lift)
    inverse = tl.where(divisor < 1.1754943508222875e-38, inverse * 0.999755859375, inverse)  # 2^-126; 1 − 2^-12
    x, inverse = x * lift, inverse + tl.zeros_like(x)
    if GPU:
        y = tl.inline_asm_elementwise(
            "mul.rz.f32 $0, $1, $2;", "=f,f,f", [x, inverse], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = truncated_product(x, inverse)
    magnitude = tl.minimum(tl.abs(y), 6.0)
    below = (magnitude * 8388608.0).to(tl.int32)
    index = tl.where(magnitude < 1.0, below, magnitude.to(tl.int32, bitcast=True) - (126 << 23))
    index = tl.minimum((index + (draws >> 10).to(tl.int32, bitcast=True)) >> 22, 7)
    index = tl.where(divisor == float("inf"), 0, index)
    bits = tl.where(index == 0, 0, tl.where(index == 1, 126 << 23, (index << 22) + (126 << 23)))
    return (bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def _draws(rows, cols, word_0, word_1):
    """Return uint32 draws [rows, cols] of global ids: the hash of ``rounding.py``."""
    row_words = mix32(rows.to(tl.uint32) * 0x9E3779B1 + word_0.to(tl.uint32))[:, None]
    factor = (mix32((cols.to(tl.uint32) >> 1) * 0x85EBCA77 + word_1.to(tl.uint32)) | 1)[None, :]
    h = row_words * factor
    h = ((h << 16) | (h >> 16)) * 0x9E3779B1 + factor
    return tl.where(((cols & 1) == 0)[None, :], h * 0xADB4A92D, h)


@triton.jit
def _side(
    x, whole, draws, signs, out_ptr, scale_ptr, M, K, m, k,
    ELEMENT: tl.constexpr, SCALING: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
    RANDOM: tl.constexpr, FOUR: tl.constexpr, EDEN: tl.constexpr, GPU: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a part in tiles of ``TILE_ROWS`` × ``TILE_COLS`` and store it, with scales that stay apart."""
    if SCALING == "fp32_tensor":
        row_tiles: tl.constexpr = 1
        col_tiles: tl.constexpr = 1
        shape: tl.constexpr = (1, R, 1, C)
    else:
        row_tiles: tl.constexpr = R // TILE_ROWS
        col_tiles: tl.constexpr = C // TILE_COLS
        shape: tl.constexpr = (R // TILE_ROWS, TILE_ROWS, C // TILE_COLS, TILE_COLS)
    tiles = tl.reshape(x, shape)
    if SCALING == "fp32_tensor":
        amax = tl.zeros((1, 1, 1, 1), tl.int32)
    else:
        amax = _largest(_magnitude(tiles))
    if FOUR:
        values, factor = _four_over_six(tiles, amax, whole, GPU)
    elif EDEN:
        values, factor = _eden(tiles, amax, whole, signs, TILE_ROWS == 1, GPU)
    else:
        divisor, factor = _scales(amax, whole, ELEMENT, SCALING)
        if RANDOM:
            values = _stochastic(tiles, divisor, tl.reshape(draws, shape), GPU)
        else:
            values = _rounded(_quotient(tiles, divisor, SCALING, GPU), tiles, ELEMENT)
    if (SCALING == "e4m3_fp32") or (SCALING == "e8m0"):
        values = values * factor
    _store(out_ptr, tl.reshape(values, (R, C)), M, K, m, k, R, C, WIDE)
    if SCALING == "fp32":
        i, j = m * row_tiles + tl.arange(0, row_tiles), k * col_tiles + tl.arange(0, col_tiles)
        width, height = tl.cdiv(K, TILE_COLS), tl.cdiv(M, TILE_ROWS)
        inside = (i < height)[:, None] & (j < width)[None, :]
        places = i.to(tl.int64)[:, None] * width + j[None, :]
        tl.store(scale_ptr + places, tl.reshape(factor, (row_tiles, col_tiles)), mask=inside)


@triton.jit
def _words(key_ptr, word_0, word_1, LOADED: tl.constexpr):
    if LOADED:
        return tl.load(key_ptr), tl.load(key_ptr + 1)
    else:
        return word_0, word_1


@triton.jit
def _whole(amax_ptr, scale_ptr, first, SCALING: tl.constexpr, FOUR: tl.constexpr, EDEN: tl.constexpr):
    """Return the scale of the tensor, which the first program stores."""
    if (SCALING == "e4m3_fp32") or (SCALING == "fp32_tensor"):
        one = tl.zeros((1, 1, 1, 1), tl.int32)
        whole = tensor_scale(tl.load(amax_ptr + one).to(tl.float32, bitcast=True), SCALING, FOUR, EDEN)
        tl.store(scale_ptr + one, whole, mask=one + first == 0)
        return whole
    else:
        return 1.0


@triton.jit(do_not_specialize=_RANDOM_ARGUMENTS)
def exact_kernel(
    x_ptr, row_ptr, row_scale_ptr, row_amax_ptr, col_ptr, col_scale_ptr, col_amax_ptr, cols_ptr,
    row_key_ptr, col_key_ptr, current_ptr, row_signs_ptr, col_signs_ptr,
    M, K, x_stride, row_word_0, row_word_1, col_word_0, col_word_1, row_signs, col_signs,
    ROW: tl.constexpr, ROW_SCALING: tl.constexpr, ROW_TILE: tl.constexpr, ROW_RANDOM: tl.constexpr,
    ROW_LOADED: tl.constexpr, ROW_FOUR: tl.constexpr, ROW_EDEN: tl.constexpr,
    COL: tl.constexpr, COL_SCALING: tl.constexpr, COL_TILE: tl.constexpr, COL_RANDOM: tl.constexpr,
    COL_LOADED: tl.constexpr, COL_FOUR: tl.constexpr, COL_EDEN: tl.constexpr,
    SQUARE_ROW: tl.constexpr, SQUARE_COL: tl.constexpr,
    ROW_TURNED: tl.constexpr, ROW_SIGNS_LOADED: tl.constexpr,
    COL_TURNED: tl.constexpr, COL_SIGNS_LOADED: tl.constexpr,
    GIVEN_COLS: tl.constexpr, GUARDED: tl.constexpr,
    GPU: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a matrix [M, K] in tiles along its columns (row side) and along its rows (col side).

    ``ROW`` and ``COL`` are the bits of an element, 0 for no side. ``ROW_TURNED`` and ``COL_TURNED`` are the points of
    the transform of a side, which is filled up to whole groups of columns or rows, or 0. ``current_ptr``: see
    ``programs.py``.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    k, m = tl.program_id(0), tl.program_id(1)
    x = _load(x_ptr, x_stride, M, K, m, k, R, C, WIDE)
    draws = x
    ids = k * C + tl.arange(0, C)
    if GIVEN_COLS:
        ids = tl.load(cols_ptr + ids, mask=ids < K, other=0)
    if ROW:
        if ROW_RANDOM:
            word_0, word_1 = _words(row_key_ptr, row_word_0, row_word_1, ROW_LOADED)
            draws = _draws(m * R + tl.arange(0, R), ids, word_0, word_1)
        whole = _whole(row_amax_ptr, row_scale_ptr, k + m, ROW_SCALING, ROW_FOUR, ROW_EDEN)
        turned, width, row_signs = x, K, _signs(row_signs_ptr, row_signs, ROW_SIGNS_LOADED)
        if ROW_TURNED:
            turned, width = _transformed_along(x, row_signs, R, C), (K + 127) // 128 * 128
        _side(
            turned, whole, draws, row_signs, row_ptr, row_scale_ptr, M, width, m, k,
            ROW, ROW_SCALING, ROW_TILE if SQUARE_ROW else 1, ROW_TILE, ROW_RANDOM, ROW_FOUR, ROW_EDEN, GPU,
            R, C, WIDE,
        )  # fmt: skip
    if COL:
        col_signs = _signs(col_signs_ptr, col_signs, COL_SIGNS_LOADED)
        if COL_TURNED:
            x = _transformed(x, col_signs, COL_TURNED, R, C)
            M = (M + (COL_TURNED - 1)) // COL_TURNED * COL_TURNED
        if COL_RANDOM:
            word_0, word_1 = _words(col_key_ptr, col_word_0, col_word_1, COL_LOADED)
            draws = _draws(m * R + tl.arange(0, R), ids, word_0, word_1)
        whole = _whole(col_amax_ptr, col_scale_ptr, k + m, COL_SCALING, COL_FOUR, COL_EDEN)
        _side(
            x, whole, draws, col_signs, col_ptr, col_scale_ptr, M, K, m, k,
            COL, COL_SCALING, COL_TILE, COL_TILE if SQUARE_COL else 1, COL_RANDOM, COL_FOUR, COL_EDEN, GPU,
            R, C, WIDE,
        )  # fmt: skip


@triton.jit
def _finite(tiles):
    """Return the largest of those tiles' integers that are magnitudes of finite numbers."""
    largest = _largest(tiles)
    largest = tl.where(largest < _INFINITY_BITS, largest, 0)
    return tl.max(tl.reshape(largest, (largest.shape[0] * largest.shape[2],)), axis=0)


@triton.jit(do_not_specialize=["row_signs", "col_signs"])
def exact_amax_kernel(
    x_ptr, amax_ptr, current_ptr, row_signs_ptr, col_signs_ptr, M, K, x_stride, row_signs, col_signs,
    TILE: tl.constexpr, SQUARE: tl.constexpr,
    ROW_TURNED: tl.constexpr, ROW_SIGNS_LOADED: tl.constexpr,
    COL_TURNED: tl.constexpr, COL_SIGNS_LOADED: tl.constexpr,
    GUARDED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Update ``amax_ptr`` (int32, zero before) with the bits of max|x| over the tiles of either side.

    With ``TILE`` 0 a NaN or Inf is the maximum. Otherwise only finite tiles of ``TILE`` numbers count, along the
    columns at 0 and along the rows at 4; with ``SQUARE`` blocks for both. ``ROW_TURNED`` and ``COL_TURNED``: see
    :func:`exact_kernel`.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    x = _load(x_ptr, x_stride, M, K, tl.program_id(1), tl.program_id(0), R, C, WIDE)
    bits = _magnitude(x)
    row = tl.max(tl.max(bits, axis=0), axis=0)
    row_bits, col_bits, col = bits, bits, row
    if ROW_TURNED:
        row_bits = _magnitude(_transformed_along(x, _signs(row_signs_ptr, row_signs, ROW_SIGNS_LOADED), R, C))
        row = tl.max(tl.max(row_bits, axis=0), axis=0)
    if COL_TURNED:
        signs = _signs(col_signs_ptr, col_signs, COL_SIGNS_LOADED)
        col_bits = _magnitude(_transformed(x, signs, COL_TURNED, R, C))
        col = tl.max(tl.max(col_bits, axis=0), axis=0)
    if TILE > 0:  # noqa: SIM102 - decided when compiled, and when run
        if max(row, col) >= _INFINITY_BITS:
            if SQUARE:
                row = _finite(tl.reshape(bits, (R // TILE, TILE, C // TILE, TILE)))
                col = row
            else:
                row = _finite(tl.reshape(row_bits, (R, 1, C // TILE, TILE)))
                col = _finite(tl.reshape(col_bits, (R // TILE, TILE, C, 1)))
    tl.atomic_max(amax_ptr, row)
    tl.atomic_max(amax_ptr + 4, col)
