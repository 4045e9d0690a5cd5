# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that quantises one side of the parts of a program: loads, transforms, quantises and stores them.

A side is computed in the shape [row tiles, rows of a tile, column tiles, columns of a tile], where scales broadcast.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.elements import magnitude_bits, to_float32
from snip_megatron.quantization.kernels.exact_memory import halves_of, lifted_tiles, load_part, scaled, store_part
from snip_megatron.quantization.kernels.exact_numbers import (
    any_bits,
    draws,
    four_over_six,
    largest,
    rounded_stochastically,
    rounded_to_nearest,
    tensor_scale,
)
from snip_megatron.quantization.kernels.exact_transform import signs_of, transformed


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
        tiles, amax = lifted_tiles(signed, whole, TILE_ROWS, TILE_COLS, GPU)
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
    halves = halves_of(tl.reshape(values, (R, C)), signed, GPU)
    if (SCALING == "e4m3_fp32") or (SCALING == "e8m0"):
        halves = scaled(halves, tl.reshape(tl.broadcast_to(factor, shape), (R, C)), GPU)
    store_part(out_ptr, halves, M, K, m, k, R, C, WIDE)
    if SCALING == "fp32":
        i, j = m * row_tiles + tl.arange(0, row_tiles), k * col_tiles + tl.arange(0, col_tiles)
        width, height = tl.cdiv(K, TILE_COLS), tl.cdiv(M, TILE_ROWS)
        inside = (i < height)[:, None] & (j < width)[None, :]
        places = i.to(tl.int64)[:, None] * width + j[None, :]
        tl.store(scale_ptr + places, tl.reshape(factor, (row_tiles, col_tiles)), mask=inside)
    return unsure


@triton.jit
def side(
    x_ptr, M, K: tl.constexpr, x_stride: tl.constexpr, first, k, out_ptr, scale_ptr, amax_ptr, cols_ptr, key_ptr,
    word_0, word_1, signs_ptr, signs,
    ALONG: tl.constexpr, ELEMENT: tl.constexpr, SCALING: tl.constexpr, TILE: tl.constexpr, RANDOM: tl.constexpr,
    LOADED: tl.constexpr, FOUR: tl.constexpr, SQUARE: tl.constexpr, TURNED: tl.constexpr,
    SIGNS_LOADED: tl.constexpr, GIVEN_COLS: tl.constexpr, GPU: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Quantise the parts of a program in tiles along the columns, with ``ALONG``, or along the rows."""
    whole = _whole(amax_ptr, scale_ptr, k + first, SCALING, FOUR)
    signs = signs_of(signs_ptr, signs, SIGNS_LOADED)
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
    NARROW: tl.constexpr = SHORT and not TURNED
    height = (M + 15) // 16 * 16 if TURNED else M
    signed = load_part(x_ptr, x_stride, M, K, m, k, R, C, WIDE)
    if TURNED:
        signed = transformed(signed, signs)
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
def _whole(amax_ptr, scale_ptr, first, SCALING: tl.constexpr, FOUR: tl.constexpr):
    """Return the scale of the tensor, which the first program stores."""
    if (SCALING == "e4m3_fp32") or (SCALING == "fp32_tensor"):
        one = tl.zeros((1, 1, 1, 1), tl.int32)
        whole = tensor_scale(tl.load(amax_ptr + one).to(tl.float32, bitcast=True), SCALING, FOUR)
        tl.store(scale_ptr + one, whole, mask=one + first == 0)
        return whole
    else:
        return 1.0
