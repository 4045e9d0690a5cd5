# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that quantises a part of a matrix to bf16 numbers, in one or both orientations.

A program makes one orientation of a part, the row side or the col side. The two programs of a part follow each other,
so that the second finds the part in the L2 cache. Each has the numbers in the order that suits its tiles. On the col
side a part has as many rows as a tile, and a thread holds whole columns of it. On the row side a thread holds
neighbouring columns, so that few threads share a tile. A side is computed in the shape [row tiles, rows of a tile,
column tiles, columns of a tile], where scales broadcast.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.hadamard import SIGN_STREAM
from snip_megatron.quantization.kernels.elements import INFINITY_BITS, lift_of, magnitude_bits, to_float32
from snip_megatron.quantization.kernels.exact_numbers import (
    any_bits,
    draws,
    eden_scales,
    eden_sums,
    four_over_six,
    inverse_power,
    largest,
    rounded_stochastically,
    rounded_to_nearest,
    tensor_scale,
)
from snip_megatron.quantization.kernels.stochastic import mix32

_RANDOM_ARGUMENTS = [f"{side}_{name}" for side in ("row", "col") for name in ("word_0", "word_1", "signs")]
_SIGN_STREAM = tl.constexpr(SIGN_STREAM)


@triton.jit
def _places(
    stride: tl.constexpr, M, K: tl.constexpr, m, k, SECOND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Return the places of part (m, k) in a matrix and whether they are inside. A thread gets ``WIDE`` columns.

    A thread accesses eight 16-bit numbers at once. With ``WIDE`` 16 the places are therefore those of the first or
    ``SECOND`` eight columns of each sixteen, [R, C / 16, 8].
    """
    i = tl.arange(0, R)
    first = m.to(tl.int64) * R * stride
    if WIDE == 16:
        j = k * C + 8 * SECOND + tl.arange(0, C // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
        places = tl.max_contiguous(first + i[:, None, None] * stride + j[None, :, :], [1, 1, 8])
        return places, (m * R + i < M)[:, None, None] & (j < K)[None, :, :]
    else:
        j = k * C + tl.arange(0, C)
        places = tl.max_contiguous(first + i[:, None] * stride + j[None, :], [1, WIDE])
        return places, (m * R + i < M)[:, None] & (j < K)[None, :]


@triton.jit
def _load(
    x_ptr, x_stride: tl.constexpr, M, K: tl.constexpr, m, k, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr
):
    """Return part (m, k) of a matrix [R, C], zero outside the matrix. A thread gets ``WIDE`` columns."""
    places, inside = _places(x_stride, M, K, m, k, 0, R, C, WIDE)
    x = tl.load(x_ptr + places, mask=inside, other=0.0)
    if WIDE == 16:
        places, inside = _places(x_stride, M, K, m, k, 1, R, C, WIDE)
        second = tl.load(x_ptr + places, mask=inside, other=0.0)
        x = tl.reshape(tl.permute(tl.join(x, second), (0, 1, 3, 2)), (R, C))
    return x


@triton.jit
def _halves(values, signed, GPU: tl.constexpr):
    """Return FP32 magnitudes that are exact in bf16 as int16 bits of bf16, with the signs of ``signed``.

    Their upper half is all of them. A NaN stays one.
    """
    if GPU and (signed.dtype == tl.float32):  # two numbers at once
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, s; prmt.b32 a, $1, $2, 0x7632; prmt.b32 s, $3, $4, 0x7632;"
            " lop3.b32 $0, a, s, 0x80008000, 0xF8; }",
            "=r,r,r,r,r", [values, signed], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    elif GPU:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; prmt.b32 a, $1, $2, 0x7632; lop3.b32 $0, a, $3, 0x80008000, 0xF8; }",
            "=r,r,r,r", [values, signed.to(tl.int16, bitcast=True)], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        sign = to_float32(signed).to(tl.int32, bitcast=True) & -0x80000000
        return ((values.to(tl.int32, bitcast=True) | sign) >> 16).to(tl.int16)


@triton.jit
def _scaled(halves, factor, GPU: tl.constexpr):
    """Return products of bf16 numbers and FP32 factors that are exact in bf16, all as int16 bits of bf16."""
    if GPU:  # two numbers at once; the addend −0 changes no product
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
            "=r,r,r", [halves, factor.to(tl.bfloat16)], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        products = (halves.to(tl.int32) << 16).to(tl.float32, bitcast=True) * factor
        return (products.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def _store(out_ptr, halves, M, K: tl.constexpr, m, k, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    places, inside = _places(K, M, K, m, k, 0, R, C, WIDE)
    if WIDE == 16:
        halves, second = tl.split(tl.permute(tl.reshape(halves, (R, C // 16, 2, 8)), (0, 1, 3, 2)))
        tl.store(out_ptr + places, halves, mask=inside)
        places, inside = _places(K, M, K, m, k, 1, R, C, WIDE)
        tl.store(out_ptr + places, second, mask=inside)
    else:
        tl.store(out_ptr + places, halves, mask=inside)


@triton.jit
def _sums(x, APART: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Replace each pair (a, b) of rows ``APART`` apart by (a + b, a − b)."""
    pairs = tl.permute(tl.reshape(x, (R // (2 * APART), 2, APART, C)), (0, 2, 3, 1))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
    return tl.reshape(pairs, (R, C))


@triton.jit
def _signs(signs_ptr, signs, LOADED: tl.constexpr):
    return tl.load(signs_ptr) if LOADED else signs


@triton.jit
def _flips(signs, POINTS: tl.constexpr):
    """Return 1 for the numbers of a group that change their sign, otherwise 0."""
    places = tl.arange(0, POINTS)
    if POINTS == 16:
        return (signs >> places) & 1
    else:
        return (mix32(places.to(tl.uint32) * 0x9E3779B1 + (signs.to(tl.uint32) ^ _SIGN_STREAM)) >> 31).to(tl.int32)


@triton.jit
def _flipped(x, signs, GPU: tl.constexpr):
    """Return x [128, …], of any dtype, with the signs of a group of 128."""
    flips = _flips(signs, 128)[:, None]
    if GPU and (x.dtype != tl.float32):  # two numbers at once
        bits = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [x.to(tl.int16, bitcast=True), (flips << 15).to(tl.int16)],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(x.dtype, bitcast=True)
    else:
        return to_float32(x) * (1 - 2 * flips).to(tl.float32)


@triton.jit
def _transformed(x, signs, POINTS: tl.constexpr, GPU: tl.constexpr):
    """Return the Hadamard transform of groups of 16 rows, or of 128 rows if x has as many, in FP32.

    The order of sums is that of ``hadamard.py``.
    """
    if POINTS == 128:
        x = to_float32(_flipped(x, signs, GPU))
    else:
        factors = (1 - 2 * _flips(signs, 16)).to(tl.float32)
        groups: tl.constexpr = (x.shape[0] // 16, 16, x.shape[1])
        x = tl.reshape(tl.reshape(to_float32(x), groups) * factors[None, :, None], x.shape)
    for i in tl.static_range(4 if POINTS == 16 else 7):
        x = _sums(x, (POINTS // 2) >> i, x.shape[0], x.shape[1])
    return x * (0.25 if POINTS == 16 else 0.08838834764831845)  # 1/√16, 1/√128


@triton.jit
def _lifted(signed, lift, GPU: tl.constexpr):
    """Return FP32 magnitudes times a power of two, ``lift`` [1, 1]. A bf16 number may underflow."""
    if GPU and (signed.dtype == tl.bfloat16):  # two numbers at once; the addend −0 changes no product
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, z; mov.b32 z, 0x80008000; and.b32 a, $2, 0x7FFF7FFF; fma.rn.bf16x2 a, a, $3, z;"
            " shl.b32 $0, a, 16; and.b32 $1, a, 0xFFFF0000; }",
            "=r,=r,r,r", [signed, lift.to(tl.bfloat16)], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.abs(to_float32(signed)) * lift


@triton.jit
def _lifted_tiles(signed, whole, ROWS: tl.constexpr, COLS: tl.constexpr, GPU: tl.constexpr):
    """Return magnitudes in tiles of ``ROWS`` × ``COLS``, in units in which the scale of the tensor is in [0.5, 1), and
    the bits of the amax of each tile.
    """
    lift = lift_of(whole)
    shape: tl.constexpr = (signed.shape[0] // ROWS, ROWS, signed.shape[1] // COLS, COLS)
    tiles = tl.reshape(_lifted(signed, tl.reshape(lift, (1, 1)), GPU), shape)
    # The amax is what it was, unless it underflowed. The tile becomes zero then.
    amax = largest(tiles.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True) * inverse_power(lift)
    return tiles, amax.to(tl.int32, bitcast=True)


@triton.jit
def _eden_part(x, whole, signs, GPU: tl.constexpr):
    """Return the bf16 bits of x [128, …] that is transformed and quantised in groups of 128 rows.

    A thread holds a whole group, so that nothing but the part itself changes threads.
    """
    x = _transformed(x, signs, 128, GPU)
    # One half after the other needs fewer registers.
    x0, x1 = tl.split(tl.permute(tl.reshape(x, (2, 64, x.shape[1])), (1, 2, 0)))
    halves0, factor0, amax0, square0, product0 = _eden_half(x0, whole, GPU)
    halves1, factor1, amax1, square1, product1 = _eden_half(x1, whole, GPU)
    square, product = square0 + square1, product0 + product1
    halves0 = _eden_scaled(halves0, factor0, amax0, square, product, 0, signs, GPU)
    halves1 = _eden_scaled(halves1, factor1, amax1, square, product, 4, signs, GPU)
    return tl.reshape(tl.permute(tl.join(halves0, halves1), (2, 0, 1)), x.shape)


@triton.jit
def _eden_half(x, whole, GPU: tl.constexpr):
    tiles, amax = _lifted_tiles(x, whole, 16, 1, GPU)
    values, factor, square, product = eden_sums(tiles, amax, whole, GPU)
    return _halves(tl.reshape(values, x.shape), x, GPU), factor, amax, square, product


@triton.jit
def _eden_scaled(halves, factor, amax, square, product, first, signs, GPU: tl.constexpr):
    scale = eden_scales(factor, amax, square, product, first, signs)
    tiles: tl.constexpr = (scale.shape[0], 16, scale.shape[2], 1)
    return _scaled(halves, tl.reshape(tl.broadcast_to(scale, tiles), halves.shape), GPU)


@triton.jit
def _eden_side(
    x_ptr, M, K: tl.constexpr, x_stride: tl.constexpr, first, k, out_ptr, scale_ptr, amax_ptr, signs_ptr, signs, along,
    WIDTH: tl.constexpr, SIGNS_LOADED: tl.constexpr, GPU: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Quantise the parts of a program in groups along the columns, if ``along``, or along the rows."""
    whole = _whole(amax_ptr, scale_ptr, k + first, "e4m3_fp32", False, True)
    signs = _signs(signs_ptr, signs, SIGNS_LOADED)
    height = tl.where(along, M, (M + 127) // 128 * 128)
    m = first * STEPS
    end = tl.minimum(m + STEPS, tl.cdiv(M, R))
    while m < end:
        x = _load(x_ptr, x_stride, M, K, m, k, R, C, WIDE)
        if along:
            x = tl.trans(x)
        halves = _eden_part(x, whole, signs, GPU)
        if along:
            halves = tl.trans(halves)
        _store(out_ptr, halves, height, WIDTH, m, k, R, C, WIDE)
        m += 1


@triton.jit
def _part(
    x, signed, whole, draw, out_ptr, scale_ptr, M, K: tl.constexpr, m, k,
    ELEMENT: tl.constexpr, SCALING: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
    RANDOM: tl.constexpr, FOUR: tl.constexpr, EXACT: tl.constexpr, SHORT: tl.constexpr, NARROW: tl.constexpr,
    GPU: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise FP32 x [R, C] in tiles of ``TILE_ROWS`` × ``TILE_COLS`` and store it, with scales that stay apart.

    Return 1 for tiles that have to be quantised again with ``EXACT``.
    """
    unsure = 0
    if SCALING == "fp32_tensor":
        row_tiles: tl.constexpr = 1
        col_tiles: tl.constexpr = 1
        shape: tl.constexpr = (1, R, 1, C)
    else:
        row_tiles: tl.constexpr = R // TILE_ROWS
        col_tiles: tl.constexpr = C // TILE_COLS
        shape: tl.constexpr = (R // TILE_ROWS, TILE_ROWS, C // TILE_COLS, TILE_COLS)
    if (SCALING == "e4m3_fp32") and not RANDOM:
        tiles, amax = _lifted_tiles(signed, whole, TILE_ROWS, TILE_COLS, GPU)
    else:
        bits = magnitude_bits(tl.reshape(x, shape))
        tiles = bits.to(tl.float32, bitcast=True)
        if SCALING == "fp32_tensor":
            amax = tl.zeros((1, 1, 1, 1), tl.int32)
        else:
            amax = largest(bits)
    if FOUR:
        values, factor, unsure = four_over_six(tiles, amax, whole, EXACT, SHORT, NARROW, GPU)
    elif RANDOM:
        values, factor = rounded_stochastically(tiles, tl.reshape(draw, shape), amax, whole, SCALING, SHORT, GPU)
    else:
        values, factor = rounded_to_nearest(tiles, amax, whole, ELEMENT, SCALING, SHORT, NARROW, GPU)
    halves = _halves(tl.reshape(values, (R, C)), signed, GPU)
    if (SCALING == "e4m3_fp32") or (SCALING == "e8m0"):
        halves = _scaled(halves, tl.reshape(tl.broadcast_to(factor, shape), (R, C)), GPU)
    _store(out_ptr, halves, M, K, m, k, R, C, WIDE)
    if SCALING == "fp32":
        i, j = m * row_tiles + tl.arange(0, row_tiles), k * col_tiles + tl.arange(0, col_tiles)
        width, height = tl.cdiv(K, TILE_COLS), tl.cdiv(M, TILE_ROWS)
        inside = (i < height)[:, None] & (j < width)[None, :]
        places = i.to(tl.int64)[:, None] * width + j[None, :]
        tl.store(scale_ptr + places, tl.reshape(factor, (row_tiles, col_tiles)), mask=inside)
    return unsure


@triton.jit
def _side(
    x_ptr, M, K: tl.constexpr, x_stride: tl.constexpr, first, k, out_ptr, scale_ptr, amax_ptr, cols_ptr, key_ptr,
    word_0, word_1, signs_ptr, signs,
    ALONG: tl.constexpr, ELEMENT: tl.constexpr, SCALING: tl.constexpr, TILE: tl.constexpr, RANDOM: tl.constexpr,
    LOADED: tl.constexpr, FOUR: tl.constexpr, SQUARE: tl.constexpr, TURNED: tl.constexpr,
    SIGNS_LOADED: tl.constexpr, GIVEN_COLS: tl.constexpr, GPU: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Quantise the parts of a program in tiles along the columns, with ``ALONG``, or along the rows."""
    whole = _whole(amax_ptr, scale_ptr, k + first, SCALING, FOUR, False)
    signs = _signs(signs_ptr, signs, SIGNS_LOADED)
    if RANDOM:
        word_0, word_1 = _words(key_ptr, word_0, word_1, LOADED)
        ids = _ids(cols_ptr, K, k, GIVEN_COLS, C)
    else:
        ids = 0
    TILE_ROWS: tl.constexpr = TILE if SQUARE or not ALONG else 1
    TILE_COLS: tl.constexpr = TILE if SQUARE or ALONG else 1
    first *= STEPS
    end = tl.minimum(first + STEPS, tl.cdiv(M, R))
    if FOUR:
        unsure = tl.zeros((R // TILE_ROWS, 1, C // TILE_COLS, 1), tl.int32)
    m = first
    while m < end:
        again = _stored_part(
            x_ptr, M, K, x_stride, m, k, whole, ids, word_0, word_1, signs, out_ptr, scale_ptr, ALONG, ELEMENT, SCALING,
            TILE_ROWS, TILE_COLS, RANDOM, FOUR, False, TURNED, GPU, R, C, WIDE,
        )  # fmt: skip
        if FOUR:
            unsure |= again << (m - first)
        m += 1
    if FOUR:
        # One tile in a few thousands is left. What follows is slower.
        left = any_bits(unsure)
        m = first
        while left != 0:
            if left & 1:
                _stored_part(
                    x_ptr, M, K, x_stride, m, k, whole, ids, word_0, word_1, signs, out_ptr, scale_ptr, ALONG, ELEMENT,
                    SCALING, TILE_ROWS, TILE_COLS, RANDOM, FOUR, True, TURNED, GPU, R, C, WIDE,
                )  # fmt: skip
            left >>= 1
            m += 1


@triton.jit
def _stored_part(
    x_ptr, M, K: tl.constexpr, x_stride: tl.constexpr, m, k, whole, ids, word_0, word_1, signs, out_ptr, scale_ptr,
    ALONG: tl.constexpr, ELEMENT: tl.constexpr, SCALING: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr, RANDOM: tl.constexpr, FOUR: tl.constexpr, EXACT: tl.constexpr,
    TURNED: tl.constexpr, GPU: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load part (m, k), transform it and quantise it. See :func:`_part`."""
    # Sixteen points divide a sum by four and keep the numbers even.
    SHORT: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    NARROW: tl.constexpr = SHORT and (TURNED == 0)
    height = (M + 15) // 16 * 16 if TURNED else M
    signed = _load(x_ptr, x_stride, M, K, m, k, R, C, WIDE)
    if TURNED:
        signed = _transformed(signed, signs, 16, GPU)
    x = to_float32(signed)
    draw = x
    if RANDOM:
        draw = draws(m * R + tl.arange(0, R), ids, word_0, word_1)
    return _part(
        x, signed, whole, draw, out_ptr, scale_ptr, height, K, m, k, ELEMENT, SCALING, TILE_ROWS, TILE_COLS,
        RANDOM, FOUR, EXACT, SHORT, NARROW, GPU, R, C, WIDE,
    )  # fmt: skip


@triton.jit
def _ids(cols_ptr, K, k, GIVEN: tl.constexpr, C: tl.constexpr):
    """Return the global ids of a part's columns."""
    ids = k * C + tl.arange(0, C)
    if GIVEN:
        return tl.load(cols_ptr + ids, mask=ids < K, other=0)
    else:
        return ids


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
    M, row_word_0, row_word_1, col_word_0, col_word_1, row_signs, col_signs,
    ROW: tl.constexpr, ROW_SCALING: tl.constexpr, ROW_TILE: tl.constexpr, ROW_RANDOM: tl.constexpr,
    ROW_LOADED: tl.constexpr, ROW_FOUR: tl.constexpr, ROW_EDEN: tl.constexpr,
    COL: tl.constexpr, COL_SCALING: tl.constexpr, COL_TILE: tl.constexpr, COL_RANDOM: tl.constexpr,
    COL_LOADED: tl.constexpr, COL_FOUR: tl.constexpr, COL_EDEN: tl.constexpr,
    SQUARE_ROW: tl.constexpr, SQUARE_COL: tl.constexpr,
    ROW_TURNED: tl.constexpr, ROW_SIGNS_LOADED: tl.constexpr,
    COL_TURNED: tl.constexpr, COL_SIGNS_LOADED: tl.constexpr,
    GIVEN_COLS: tl.constexpr, GUARDED: tl.constexpr,
    GPU: tl.constexpr, K: tl.constexpr, x_stride: tl.constexpr, R: tl.constexpr,
    ROW_C: tl.constexpr, ROW_WIDE: tl.constexpr, COL_C: tl.constexpr, COL_WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Quantise a matrix [M, K] in tiles along its columns (row side) and along its rows (col side).

    ``ROW`` and ``COL`` are the bits of an element, 0 for no side. ``ROW_TURNED`` and ``COL_TURNED`` are the points of
    the transform of a side, which is filled up to whole groups of columns or rows, or 0. ``ROW_C`` and ``COL_C`` are
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
    WIDTH: tl.constexpr = (K + 127) // 128 * 128
    if ROW_EDEN and COL_EDEN and (K == WIDTH) and (ROW_SIGNS_LOADED == COL_SIGNS_LOADED):
        # One code for both sides, because the cache of instructions does not hold two.
        along = place < ROWS
        out_ptr, scale_ptr, amax_ptr, signs_ptr, signs = (
            col_ptr, col_scale_ptr, col_amax_ptr, col_signs_ptr, col_signs
        )  # fmt: skip
        if along:
            out_ptr, scale_ptr, amax_ptr, signs_ptr, signs = (
                row_ptr, row_scale_ptr, row_amax_ptr, row_signs_ptr, row_signs
            )  # fmt: skip
        _eden_side(
            x_ptr, M, K, x_stride, m, part, out_ptr, scale_ptr, amax_ptr, signs_ptr, signs, along,
            K, ROW_SIGNS_LOADED, GPU, R, ROW_C, ROW_WIDE, STEPS,
        )  # fmt: skip
    else:
        if ROW:  # noqa: SIM102 - decided when compiled, and when run
            if (COLS == 0) or (place < ROWS):
                if ROW_EDEN:
                    _eden_side(
                        x_ptr, M, K, x_stride, m, part * ROWS + place, row_ptr, row_scale_ptr, row_amax_ptr,
                        row_signs_ptr, row_signs, True, WIDTH, ROW_SIGNS_LOADED, GPU, R, ROW_C, ROW_WIDE, STEPS,
                    )  # fmt: skip
                else:
                    _side(
                        x_ptr, M, K, x_stride, m, part * ROWS + place, row_ptr, row_scale_ptr, row_amax_ptr, cols_ptr,
                        row_key_ptr, row_word_0, row_word_1, row_signs_ptr, row_signs,
                        True, ROW, ROW_SCALING, ROW_TILE, ROW_RANDOM, ROW_LOADED, ROW_FOUR, SQUARE_ROW, ROW_TURNED,
                        ROW_SIGNS_LOADED, GIVEN_COLS, GPU, R, ROW_C, ROW_WIDE, STEPS,
                    )  # fmt: skip
        if COL:  # noqa: SIM102
            if (ROWS == 0) or (place >= ROWS):
                if COL_EDEN:
                    _eden_side(
                        x_ptr, M, K, x_stride, m, part * COLS + place - ROWS, col_ptr, col_scale_ptr, col_amax_ptr,
                        col_signs_ptr, col_signs, False, K, COL_SIGNS_LOADED, GPU, R, COL_C, COL_WIDE, STEPS,
                    )  # fmt: skip
                else:
                    _side(
                        x_ptr, M, K, x_stride, m, part * COLS + place - ROWS, col_ptr, col_scale_ptr, col_amax_ptr,
                        cols_ptr, col_key_ptr, col_word_0, col_word_1, col_signs_ptr, col_signs,
                        False, COL, COL_SCALING, COL_TILE, COL_RANDOM, COL_LOADED, COL_FOUR, SQUARE_COL, COL_TURNED,
                        COL_SIGNS_LOADED, GIVEN_COLS, GPU, R, COL_C, COL_WIDE, STEPS,
                    )  # fmt: skip


@triton.jit
def _finite(tiles):
    """Return the largest of those tiles' integers that are magnitudes of finite numbers."""
    found = largest(tiles)
    found = tl.where(found < INFINITY_BITS, found, 0)
    return tl.max(tl.reshape(found, (found.shape[0] * found.shape[2],)), axis=0)


@triton.jit(do_not_specialize=["row_signs", "col_signs"])
def exact_amax_kernel(
    x_ptr, amax_ptr, current_ptr, row_signs_ptr, col_signs_ptr, M, row_signs, col_signs,
    TILE: tl.constexpr, SQUARE: tl.constexpr,
    ROW_TURNED: tl.constexpr, ROW_SIGNS_LOADED: tl.constexpr,
    COL_TURNED: tl.constexpr, COL_SIGNS_LOADED: tl.constexpr,
    GUARDED: tl.constexpr, GPU: tl.constexpr,
    K: tl.constexpr, x_stride: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
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
    bits = magnitude_bits(to_float32(x))
    row = tl.max(tl.max(bits, axis=0), axis=0)
    row_bits, col_bits, col = bits, bits, row
    if ROW_TURNED:
        signs = _signs(row_signs_ptr, row_signs, ROW_SIGNS_LOADED)
        row_bits = magnitude_bits(_transformed(tl.trans(x), signs, 128, GPU))
        row = tl.max(tl.max(row_bits, axis=0), axis=0)
    if COL_TURNED:
        signs = _signs(col_signs_ptr, col_signs, COL_SIGNS_LOADED)
        col_bits = magnitude_bits(_transformed(x, signs, COL_TURNED, GPU))
        col = tl.max(tl.max(col_bits, axis=0), axis=0)
    if TILE > 0:  # noqa: SIM102 - decided when compiled, and when run
        if max(row, col) >= INFINITY_BITS:
            if SQUARE:
                row = _finite(tl.reshape(bits, (R // TILE, TILE, C // TILE, TILE)))
                col = row
            else:
                if ROW_TURNED:
                    row = _finite(tl.reshape(row_bits, (C // TILE, TILE, R, 1)))
                else:
                    row = _finite(tl.reshape(row_bits, (R, 1, C // TILE, TILE)))
                col = _finite(tl.reshape(col_bits, (R // TILE, TILE, C, 1)))
    # Few programs find a number that is larger than what is there, and atomics at one address wait for each other.
    tl.atomic_max(amax_ptr, row, mask=row > tl.load(amax_ptr, cache_modifier=".cg"))
    tl.atomic_max(amax_ptr + 4, col, mask=col > tl.load(amax_ptr + 4, cache_modifier=".cg"))
