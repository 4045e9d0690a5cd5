# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of ``exact.py``: a program quantises a part of a matrix, in tiles along its columns or along its rows.

Tiles have the shape [row tiles, rows of a tile, column tiles, columns of a tile], where scales broadcast. Elements are
rounded as magnitudes, and get their signs when they are stored. The code needs no instruction that an Ampere GPU does
not have.
"""

import triton
import triton.language as tl

from snip_megatron.numerics.quantize.kernels.elements import INFINITY_BITS, constant, magnitude_bits, to_float32
from snip_megatron.numerics.quantize.kernels.stochastic import mix32

_SIGN = tl.constexpr(-0x80000000)
_ERROR_STEPS = tl.constexpr(1048576.0)  # a squared error is an integer in units of 2^-20, as in reference.py
_LARGEST_ERROR = tl.constexpr(67108864.0)


@triton.jit
def _places(stride, m, k, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows and columns of part (m, k), and its places in memory. A thread gets ``WIDE`` columns."""
    rows, cols = m * R + tl.arange(0, R), k * C + tl.arange(0, C)
    places = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return rows, cols, tl.max_contiguous(places, [1, WIDE])


@triton.jit
def _largest(tiles):
    return tl.max(tl.max(tiles, axis=3, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def nearest(y, ELEMENT: tl.constexpr):
    """Saturate y ≥ 0 and round it to E2M1 (``ELEMENT`` 4) or E4M3 (8), to nearest, ties to even.

    Subtracting y from 2^22 y (2^20 y for E4M3), and the result from that number, rounds: its last bit is the spacing of
    numbers near y. Where y is a tie, that bit is zero, so that the even number remains. Below 1.5 times the smallest
    normal number all spacings are equal.
    """
    maximum: tl.constexpr = 6.0 if ELEMENT == 4 else 448.0
    least: tl.constexpr = 1.5 if ELEMENT == 4 else 0.0234375
    spacings: tl.constexpr = 4194304.0 if ELEMENT == 4 else 1048576.0
    y = tl.minimum(y, maximum, propagate_nan=tl.PropagateNan.ALL)
    multiple = tl.maximum(y, least) * spacings  # exact, so that it may be part of an FMA
    return multiple - (multiple - y)


@triton.jit
def stochastic(y, draw):
    """Round y ≥ 0 to E2M1, up with the probability that is given by how near the number above is; saturate.

    FP32 numbers 2^-126·y are counted by their bits, and the upper bits of the count are the E2M1 number, below 1, where
    they are subnormal, as above. So the draw is added to the 22 bits that follow.
    """
    count = (y * 1.1754943508222875e-38).to(tl.uint32, bitcast=True) + (draw >> 10)
    count = tl.minimum(count, 0x01FFFFFF) & 0xFFC00000  # at most 6, which NaN becomes too
    return count.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def draws(rows, cols, word_0, word_1):
    """Return uint32 draws [rows, cols] of global ids: the hash of ``rounding.py``."""
    row_words = mix32(rows.to(tl.uint32) * 0x9E3779B1 + word_0.to(tl.uint32))
    factors = mix32((cols.to(tl.uint32) >> 1) * 0x85EBCA77 + word_1.to(tl.uint32)) | 1
    h = row_words[:, None] * factors[None, :]
    h = ((h << 16) | (h >> 16)) * 0x9E3779B1 + factors[None, :]
    return tl.where((cols & 1 == 0)[None, :], h * 0xADB4A92D, h)


@triton.jit
def _sums(x, APART: tl.constexpr):
    """Replace each pair (a, b) of rows ``APART`` apart by (a + b, a − b)."""
    pairs = tl.permute(tl.reshape(x, (x.shape[0] // (2 * APART), 2, APART, x.shape[1])), (0, 2, 3, 1))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
    return tl.reshape(pairs, x.shape)


@triton.jit
def transformed(x, signs_ptr, signs, LOADED: tl.constexpr):
    """Return the Hadamard transform of groups of 16 rows. The order of sums is that of ``hadamard.py``."""
    if LOADED:
        signs = tl.load(signs_ptr)
    factors = (1 - 2 * ((signs >> tl.arange(0, 16)) & 1)).to(tl.float32)
    groups: tl.constexpr = (x.shape[0] // 16, 16, x.shape[1])
    x = tl.reshape(tl.reshape(x, groups) * factors[None, :, None], x.shape)
    for i in tl.static_range(4):
        x = _sums(x, 8 >> i)
    return x * 0.25


@triton.jit
def _tensor_scale(amax_ptr, SCALING: tl.constexpr, FOUR: tl.constexpr):
    """Return the FP32 scale [1, 1, 1, 1] of a tensor: amax / 448, amax / (6·448) or, with ``FOUR``, amax / (6·256)."""
    bits = tl.load(amax_ptr + tl.zeros((1, 1, 1, 1), tl.int32))
    amax = bits.to(tl.float32, bitcast=True)
    maximum: tl.constexpr = 448.0 if SCALING == "fp32_tensor" else 6.0 * (256.0 if FOUR else 448.0)
    scale = tl.div_rn(amax, constant(maximum, amax))
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where((bits >= INFINITY_BITS) & (SCALING == "fp32_tensor"), float("nan"), scale)


@triton.jit
def _power_of_two(amax_bits, ELEMENT: tl.constexpr):
    """Return the E8M0 scale of tiles, 2^(floor(log2 amax) − emax), at least 2^-127, and its reciprocal."""
    exponent = tl.maximum((amax_bits >> 23) - (2 if ELEMENT == 4 else 8), 0)
    exponent = tl.where(amax_bits == 0, 127, exponent)
    scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3_quotients(tiles, amax_bits, whole, MAXIMUM: tl.constexpr):
    """Return x over the scales of tiles whose amax becomes ``MAXIMUM``, and the E4M3 scales. Zero scales give zeros."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = nearest(tl.div_rn(tl.div_rn(amax, constant(MAXIMUM, amax)), whole + tl.zeros_like(amax)), 8)
    divisor = scale * whole
    divisor = tl.where(divisor == 0.0, float("inf"), divisor)
    return tl.div_rn(tiles, divisor + tl.zeros_like(tiles)), scale


@triton.jit
def _candidate(tiles, amax_bits, whole, MAXIMUM: tl.constexpr):
    """Return E2M1 elements, E4M3 scales and squared errors of tiles, which are sums of integers, equal in any order."""
    y, scale = _e4m3_quotients(tiles, amax_bits, whole, MAXIMUM)
    values = nearest(y, 4)
    error = tl.minimum((values - y) * (values - y) * _ERROR_STEPS, _LARGEST_ERROR)
    error = tl.where(error == error, error, 0.0).to(tl.int32)
    total = tl.sum(tl.sum(error, axis=3, keep_dims=True), axis=1, keep_dims=True)
    return values, scale, total.to(tl.float32) * scale * scale


@triton.jit
def _quantised(
    tiles, amax_bits, whole, draw, ELEMENT: tl.constexpr, SCALING: tl.constexpr, RANDOM: tl.constexpr,
    FOUR: tl.constexpr,
):  # fmt: skip
    """Return the elements of tiles of magnitudes and the factors of tiles, from the bits of max|x| of each tile.

    ``whole`` is the scale of the tensor, which is no part of the factors of nvfp4.
    """
    if FOUR:
        values, factor, error = _candidate(tiles, amax_bits, whole, 6.0)
        others, other, error_of_other = _candidate(tiles, amax_bits, whole, 4.0)
        smaller = (error_of_other < error) | (factor == 0.0)
        values, factor = tl.where(smaller, others, values), tl.where(smaller, other, factor)
    else:
        if SCALING == "e8m0":
            factor, inverse = _power_of_two(amax_bits, ELEMENT)
            y = tiles * inverse
        elif SCALING == "e4m3_fp32":
            y, factor = _e4m3_quotients(tiles, amax_bits, whole, 6.0)
        else:
            factor = whole + tl.zeros_like(amax_bits).to(tl.float32)
            if SCALING == "fp32":
                amax = amax_bits.to(tl.float32, bitcast=True)
                factor = tl.div_rn(amax, constant(6.0 if ELEMENT == 4 else 448.0, amax))
                factor = tl.where(factor == 0.0, 1.0, factor)
            y = tl.div_rn(tiles, factor + tl.zeros_like(tiles))
        values = stochastic(y, draw) if RANDOM else nearest(y, ELEMENT)
    return values, tl.where(amax_bits < INFINITY_BITS, factor, float("nan"))


@triton.jit(do_not_specialize=["word_0", "word_1", "signs"])
def side_kernel(
    x_ptr, out_ptr, scale_ptr, amax_ptr, cols_ptr, key_ptr, signs_ptr, current_ptr, M, word_0, word_1, signs,
    ELEMENT: tl.constexpr, SCALING: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
    RANDOM: tl.constexpr, KEY_LOADED: tl.constexpr, FOUR: tl.constexpr, TURNED: tl.constexpr,
    SIGNS_LOADED: tl.constexpr, GUARDED: tl.constexpr, K: tl.constexpr, x_stride: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a part [R, C] of a matrix [M, K] in tiles of ``TILE_ROWS`` × ``TILE_COLS``.

    ``ELEMENT`` is the number of bits of an element. Values are the numbers in bf16, as 16-bit words, over the scale of
    the tensor ("e4m3_fp32", "fp32_tensor") or of their tile ("fp32"), which is stored beside them. A matrix that is
    ``TURNED`` is filled up to whole groups of 16 rows. ``current_ptr``: see ``programs.py``.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    k, m = tl.program_id(0), tl.program_id(1)
    rows, cols, places = _places(x_stride, m, k, R, C, WIDE)
    x = to_float32(tl.load(x_ptr + places, mask=(rows < M)[:, None] & (cols < K)[None, :], other=0.0))
    height = M
    if TURNED:
        x, height = transformed(x, signs_ptr, signs, SIGNS_LOADED), (M + 15) // 16 * 16
    inside = (rows < height)[:, None] & (cols < K)[None, :]
    draw = x
    if RANDOM:
        if KEY_LOADED:
            word_0, word_1 = tl.load(key_ptr), tl.load(key_ptr + 1)
        draw = draws(rows, tl.load(cols_ptr + cols, mask=cols < K, other=0), word_0, word_1)
    whole = 1.0
    if (SCALING == "e4m3_fp32") or (SCALING == "fp32_tensor"):
        whole = _tensor_scale(amax_ptr, SCALING, FOUR)
        one = tl.zeros((1, 1, 1, 1), tl.int32)
        tl.store(scale_ptr + one, whole, mask=one + k + m == 0)
    row_tiles: tl.constexpr = R // TILE_ROWS
    col_tiles: tl.constexpr = C // TILE_COLS
    shape: tl.constexpr = (row_tiles, TILE_ROWS, col_tiles, TILE_COLS)
    bits = magnitude_bits(tl.reshape(x, shape))
    amax = tl.zeros((row_tiles, 1, col_tiles, 1), tl.int32)
    if SCALING != "fp32_tensor":
        amax = _largest(bits)
    tiles, draw = bits.to(tl.float32, bitcast=True), tl.reshape(draw, shape)
    values, factor = _quantised(tiles, amax, whole, draw, ELEMENT, SCALING, RANDOM, FOUR)
    if (SCALING == "e4m3_fp32") or (SCALING == "e8m0"):
        values = values * factor
    signed = tl.reshape(values, (R, C)).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)
    _, _, places = _places(K, m, k, R, C, WIDE)
    tl.store(out_ptr + places, (signed >> 16).to(tl.int16), mask=inside)  # the upper half is all of a bf16 number
    if SCALING == "fp32":
        i, j = m * row_tiles + tl.arange(0, row_tiles), k * col_tiles + tl.arange(0, col_tiles)
        width: tl.constexpr = (K + TILE_COLS - 1) // TILE_COLS
        known = (i < tl.cdiv(M, TILE_ROWS))[:, None] & (j < width)[None, :]
        places = i.to(tl.int64)[:, None] * width + j[None, :]
        tl.store(scale_ptr + places, tl.reshape(factor, (row_tiles, col_tiles)), mask=known)


@triton.jit(do_not_specialize=["signs"])
def amax_kernel(
    x_ptr, amax_ptr, signs_ptr, current_ptr, M, signs, FINITE: tl.constexpr, TURNED: tl.constexpr,
    SIGNS_LOADED: tl.constexpr, GUARDED: tl.constexpr, K: tl.constexpr, x_stride: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raise ``amax_ptr`` (int32, zero before) to the bits of max|x|, with ``FINITE`` over finite numbers alone."""
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    rows, cols, places = _places(x_stride, tl.program_id(1), tl.program_id(0), R, C, WIDE)
    x = tl.load(x_ptr + places, mask=(rows < M)[:, None] & (cols < K)[None, :], other=0.0)
    x = to_float32(x)
    if TURNED:
        x = transformed(x, signs_ptr, signs, SIGNS_LOADED)
    bits = magnitude_bits(x)
    if FINITE:
        bits = tl.where(bits < INFINITY_BITS, bits, 0)
    amax = tl.max(tl.max(bits, axis=0), axis=0)
    # Few programs find a number that is larger than what is there, and atomics at one address wait for each other.
    tl.atomic_max(amax_ptr, amax, mask=amax > tl.load(amax_ptr, cache_modifier=".cg"))
