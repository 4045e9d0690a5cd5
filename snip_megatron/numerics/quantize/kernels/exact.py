# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The quantiser of bf16 operands in ``operands.py`` as Triton kernels, one launch for each operand.

A program quantises a part of a matrix. Tiles have the shape [row tiles, rows of a tile, column tiles, columns of a
tile], where scales broadcast. Elements are rounded as magnitudes, and get their signs when they are stored. The code
needs no instruction that an Ampere GPU does not have.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from snip_megatron.numerics.quantize.formats import E2M1, SPECS, Scaling
from snip_megatron.numerics.quantize.kernels.device import (
    INFINITY_BITS,
    constant_like,
    magnitude_bits,
    mix32,
    raise_amax,
    to_float32,
)
from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.kernels.quantize import amax_bits, checked_matrix, key_memory, key_numbers
from snip_megatron.numerics.quantize.operands import (
    CachedPair,
    ExactOperand,
    OperandPair,
    OperandSpec,
    operands_are_equal,
)
from snip_megatron.numerics.quantize.reference import POINTS, Rotation, is_rotated
from snip_megatron.precision import Format

# -- device code -----------------------------------------------------------------------------------------------------
_SIGN = tl.constexpr(-0x80000000)
_ERROR_STEPS = tl.constexpr(1048576.0)  # a squared error is an integer in units of 2^-20, as in reference.py
_LARGEST_ERROR = tl.constexpr(67108864.0)


@triton.jit
def _offsets(stride, m, k, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows and columns of part (m, k), and its offsets in memory. A thread gets ``WIDE`` columns."""
    rows, cols = m * R + tl.arange(0, R), k * C + tl.arange(0, C)
    offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return rows, cols, tl.max_contiguous(offsets, [1, WIDE])


@triton.jit
def _largest(tiles):
    return tl.max(tl.max(tiles, axis=3, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def nearest(y, ELEMENT: tl.constexpr):
    """Saturate y ≥ 0 and round it to E2M1 (``ELEMENT`` 4) or E4M3 (8), to nearest, ties to even.

    The last bit of 2^22·y (E4M3: 2^20·y) has the value of the spacing of numbers near y. Subtracting y from that
    number, and the result from that number again, therefore rounds y. Below 1.5 times the smallest normal number all
    spacings are equal.
    """
    maximum: tl.constexpr = 6.0 if ELEMENT == 4 else 448.0
    least: tl.constexpr = 1.5 if ELEMENT == 4 else 0.0234375
    spacings: tl.constexpr = 4194304.0 if ELEMENT == 4 else 1048576.0
    y = tl.minimum(y, maximum, propagate_nan=tl.PropagateNan.ALL)
    multiple = tl.maximum(y, least) * spacings  # exact, so that it may be part of an FMA
    return multiple - (multiple - y)


@triton.jit
def stochastic(y, draw):
    """Saturate y ≥ 0 and round it to E2M1 stochastically.

    The upper bits of the FP32 number 2^-126·y are the index of the E2M1 number below y, also if the number is subnormal
    (y < 1). The draw is added to the other 22 bits, and a carry rounds up.
    """
    count = (y * 1.1754943508222875e-38).to(tl.uint32, bitcast=True) + (draw >> 10)
    count = tl.minimum(count, 0x01FFFFFF) & 0xFFC00000  # at most 6. NaN becomes 6 too
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
def rotate_rows(x, signs_ptr, signs, LOADED: tl.constexpr):
    """Return the Hadamard transform of groups of 16 rows. The order of sums is that of ``reference.rotate``."""
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
    scale = tl.div_rn(amax, constant_like(maximum, amax))
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
def _e4m3_quotients(tiles, amax_bits, tensor_scale, MAXIMUM: tl.constexpr):
    """Return x over the scales of tiles whose amax becomes ``MAXIMUM``, and the E4M3 scales. Zero scales give zeros."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = nearest(tl.div_rn(tl.div_rn(amax, constant_like(MAXIMUM, amax)), tensor_scale + tl.zeros_like(amax)), 8)
    divisor = scale * tensor_scale
    divisor = tl.where(divisor == 0.0, float("inf"), divisor)
    return tl.div_rn(tiles, divisor + tl.zeros_like(tiles)), scale


@triton.jit
def _four_or_six(tiles, amax_bits, tensor_scale, MAXIMUM: tl.constexpr):
    """Return E2M1 elements, E4M3 scales and squared errors of tiles. The errors are sums of integers, in any order."""
    y, scale = _e4m3_quotients(tiles, amax_bits, tensor_scale, MAXIMUM)
    values = nearest(y, 4)
    error = tl.minimum((values - y) * (values - y) * _ERROR_STEPS, _LARGEST_ERROR)
    error = tl.where(error == error, error, 0.0).to(tl.int32)
    total = tl.sum(tl.sum(error, axis=3, keep_dims=True), axis=1, keep_dims=True)
    return values, scale, total.to(tl.float32) * scale * scale


@triton.jit
def _quantize_tiles(
    tiles, amax_bits, tensor_scale, draw, ELEMENT: tl.constexpr, SCALING: tl.constexpr, RANDOM: tl.constexpr,
    FOUR: tl.constexpr,
):  # fmt: skip
    """Return the elements and the scales of tiles of magnitudes, from the bits of max|x| of each tile.

    ``tensor_scale`` is the scale of the tensor. The scales of nvfp4's tiles do not include it.
    """
    if FOUR:
        values, factor, error = _four_or_six(tiles, amax_bits, tensor_scale, 6.0)
        other_values, other_factor, other_error = _four_or_six(tiles, amax_bits, tensor_scale, 4.0)
        smaller = (other_error < error) | (factor == 0.0)
        values, factor = tl.where(smaller, other_values, values), tl.where(smaller, other_factor, factor)
    else:
        if SCALING == "e8m0":
            factor, inverse = _power_of_two(amax_bits, ELEMENT)
            y = tiles * inverse
        elif SCALING == "e4m3_fp32":
            y, factor = _e4m3_quotients(tiles, amax_bits, tensor_scale, 6.0)
        else:
            factor = tensor_scale + tl.zeros_like(amax_bits).to(tl.float32)
            if SCALING == "fp32":
                amax = amax_bits.to(tl.float32, bitcast=True)
                factor = tl.div_rn(amax, constant_like(6.0 if ELEMENT == 4 else 448.0, amax))
                factor = tl.where(factor == 0.0, 1.0, factor)
            y = tl.div_rn(tiles, factor + tl.zeros_like(tiles))
        values = stochastic(y, draw) if RANDOM else nearest(y, ELEMENT)
    return values, tl.where(amax_bits < INFINITY_BITS, factor, float("nan"))


@triton.jit(do_not_specialize=["word_0", "word_1", "signs"])
def side_kernel(
    x_ptr, out_ptr, scale_ptr, amax_ptr, cols_ptr, key_ptr, signs_ptr, current_ptr, M, word_0, word_1, signs,
    ELEMENT: tl.constexpr, SCALING: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
    RANDOM: tl.constexpr, KEY_LOADED: tl.constexpr, FOUR: tl.constexpr, ROTATED: tl.constexpr,
    SIGNS_LOADED: tl.constexpr, GUARDED: tl.constexpr, K: tl.constexpr, x_stride: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a part [R, C] of a matrix [M, K] in tiles of ``TILE_ROWS`` × ``TILE_COLS``.

    ``ELEMENT`` is the number of bits of an element. Values are the quantised numbers in bf16, divided by the scale of
    the tensor ("e4m3_fp32", "fp32_tensor") or of their tile ("fp32"). That scale is stored too. ``GUARDED`` and
    ``current_ptr``: see ``programs.py``.
    """
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    k, m = tl.program_id(0), tl.program_id(1)
    rows, cols, offsets = _offsets(x_stride, m, k, R, C, WIDE)
    x = to_float32(tl.load(x_ptr + offsets, mask=(rows < M)[:, None] & (cols < K)[None, :], other=0.0))
    height = M
    if ROTATED:
        x, height = rotate_rows(x, signs_ptr, signs, SIGNS_LOADED), (M + 15) // 16 * 16
    inside = (rows < height)[:, None] & (cols < K)[None, :]
    draw = x
    if RANDOM:
        if KEY_LOADED:
            word_0, word_1 = tl.load(key_ptr), tl.load(key_ptr + 1)
        draw = draws(rows, tl.load(cols_ptr + cols, mask=cols < K, other=0), word_0, word_1)
    tensor_scale = 1.0
    if (SCALING == "e4m3_fp32") or (SCALING == "fp32_tensor"):
        tensor_scale = _tensor_scale(amax_ptr, SCALING, FOUR)
        origin = tl.zeros((1, 1, 1, 1), tl.int32)
        tl.store(scale_ptr + origin, tensor_scale, mask=origin + k + m == 0)
    row_tiles: tl.constexpr = R // TILE_ROWS
    col_tiles: tl.constexpr = C // TILE_COLS
    shape: tl.constexpr = (row_tiles, TILE_ROWS, col_tiles, TILE_COLS)
    bits = magnitude_bits(tl.reshape(x, shape))
    amax = tl.zeros((row_tiles, 1, col_tiles, 1), tl.int32)
    if SCALING != "fp32_tensor":
        amax = _largest(bits)
    tiles, draw = bits.to(tl.float32, bitcast=True), tl.reshape(draw, shape)
    values, factor = _quantize_tiles(tiles, amax, tensor_scale, draw, ELEMENT, SCALING, RANDOM, FOUR)
    if (SCALING == "e4m3_fp32") or (SCALING == "e8m0"):
        values = values * factor
    signed = tl.reshape(values, (R, C)).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)
    _, _, offsets = _offsets(K, m, k, R, C, WIDE)
    tl.store(out_ptr + offsets, (signed >> 16).to(tl.int16), mask=inside)  # the upper half is all of a bf16 number
    if SCALING == "fp32":
        i, j = m * row_tiles + tl.arange(0, row_tiles), k * col_tiles + tl.arange(0, col_tiles)
        width: tl.constexpr = (K + TILE_COLS - 1) // TILE_COLS
        valid = (i < tl.cdiv(M, TILE_ROWS))[:, None] & (j < width)[None, :]
        offsets = i.to(tl.int64)[:, None] * width + j[None, :]
        tl.store(scale_ptr + offsets, tl.reshape(factor, (row_tiles, col_tiles)), mask=valid)


@triton.jit(do_not_specialize=["signs"])
def amax_kernel(
    x_ptr, amax_ptr, signs_ptr, current_ptr, M, signs, FINITE: tl.constexpr, ROTATED: tl.constexpr,
    SIGNS_LOADED: tl.constexpr, GUARDED: tl.constexpr, K: tl.constexpr, x_stride: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the bits of max|x| to ``amax_ptr``, int32 and zero before. With ``FINITE`` x are the finite numbers."""
    if GUARDED:  # noqa: SIM102 - decided when compiled, and when run
        if tl.load(current_ptr) != 0:
            return
    rows, cols, offsets = _offsets(x_stride, tl.program_id(1), tl.program_id(0), R, C, WIDE)
    x = tl.load(x_ptr + offsets, mask=(rows < M)[:, None] & (cols < K)[None, :], other=0.0)
    x = to_float32(x)
    if ROTATED:
        x = rotate_rows(x, signs_ptr, signs, SIGNS_LOADED)
    bits = magnitude_bits(x)
    if FINITE:
        bits = tl.where(bits < INFINITY_BITS, bits, 0)
    amax = tl.max(tl.max(bits, axis=0), axis=0)
    raise_amax(amax_ptr, amax)


# -- launches --------------------------------------------------------------------------------------------------------
_TENSOR_SCALINGS = (Scaling.E4M3_FP32, Scaling.FP32_TENSOR)


class Shape(NamedTuple):
    """The rows and columns of a program, neighbouring columns of a thread, and warps."""

    rows: int
    cols: int
    wide: int
    warps: int


SHAPES = {
    "rows": Shape(16, 128, 8, 4),  # tiles along the columns: few threads share one
    "columns": Shape(16, 256, 2, 4),  # tiles along the rows and square blocks: a thread holds whole columns
    "tiles of 128": Shape(128, 128, 8, 8),
    "amax": Shape(16, 512, 4, 4),
}
"""Kind of a launch → its shape. ``benchmarks/kernels/emulated_sweep.py`` times other shapes, as for another GPU."""


def quantize_exact(x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.operands.quantize_exact`."""
    x, equal = checked_matrix(x), operands_are_equal(spec)
    operands: list[Any] = [None, None] if cached is None else [*cached.operands]
    current = None if cached is None else cached.current
    amaxes: dict[tuple[bool, bool], Tensor] = {}  # (over finite numbers, of the transform) → amax
    for index, fmt in enumerate(spec.formats):
        if fmt is None or (equal and index == 1):
            continue
        rotation = None
        if is_rotated(fmt, 1 - index, weight=spec.weight):
            rotation = spec.rotation or Rotation()
        if operands[index] is None:
            operands[index] = _output(x, fmt, 1 - index, spec, rotation)
        if not x.numel():
            continue
        bits, scaling = x, SPECS[fmt].scaling
        if scaling in _TENSOR_SCALINGS:
            amax = spec.amax if rotation is None else rotation.amax
            kind = (scaling is Scaling.E4M3_FP32, rotation is not None)
            if kind not in amaxes:
                amaxes[kind] = _amax(x, kind[0], rotation, current) if amax is None else amax_bits(amax)
            bits = amaxes[kind]
        _quantize(x, index, spec, operands[index], rotation, bits, current)
    return operands[0], operands[0] if equal else operands[1]


def _output(x: Tensor, fmt: Format, axis: int, spec: OperandSpec, rotation: Rotation | None) -> ExactOperand:
    """Return memory for an operand. A scale is 1 if no kernel writes it."""
    (M, K), format_spec = x.shape, SPECS[fmt]
    height = M if rotation is None else -(-M // POINTS) * POINTS
    values = torch.empty(height, K, dtype=torch.bfloat16, device=x.device)
    if format_spec.scaling is Scaling.FP32:
        tile = format_spec.tile_shape(axis, spec.weight)
        return ExactOperand(values, torch.empty(-(-M // tile[0]), -(-K // tile[1]), device=x.device), tile)
    whole = format_spec.scaling in _TENSOR_SCALINGS
    return ExactOperand(values, (torch.empty if x.numel() else torch.ones)(1, device=x.device) if whole else None, None)


def _quantize(
    x: Tensor,
    index: int,
    spec: OperandSpec,
    operand: ExactOperand,
    rotation: Rotation | None,
    amax: Tensor,
    current: Tensor | None,
) -> None:
    """Write one operand of x, the rowwise (``index`` 0) or the columnwise one (1)."""
    (M, K), fmt, seed, cols = x.shape, spec.formats[index], spec.seeds[index], x
    assert fmt is not None
    format_spec = SPECS[fmt]
    tile = format_spec.tile_shape(1 - index, spec.weight) if format_spec.tile else (1, 1)
    if seed is not None and spec.keys is not None:
        cols = torch.arange(K, device=x.device) if spec.keys.cols is None else spec.keys.cols
    signs, signs_loaded, number = _signs(rotation, x)
    shape = SHAPES["tiles of 128" if format_spec.scaling is Scaling.FP32 else "columns" if tile[0] > 1 else "rows"]
    rows = max(shape.rows, tile[0])
    launch(
        side_kernel, (-(-K // shape.cols), -(-M // rows)),
        [
            x, (operand.values, torch.int16), x if operand.scale is None else operand.scale, amax, cols,
            key_memory(seed, x), signs, x if current is None else current,
        ],
        (M,), (*key_numbers(seed), number),
        {
            "ELEMENT": 4 if format_spec.element is E2M1 else 8, "SCALING": format_spec.scaling.value,
            "TILE_ROWS": tile[0], "TILE_COLS": tile[1],
            "RANDOM": seed is not None, "KEY_LOADED": isinstance(seed, Tensor), "FOUR": format_spec.four_over_six,
            "ROTATED": rotation is not None, "SIGNS_LOADED": signs_loaded, "GUARDED": current is not None,
            "K": K, "x_stride": x.stride(0), "R": rows, "C": shape.cols, "WIDE": shape.wide,
        },
        {"num_warps": shape.warps},
    )  # fmt: skip


def _amax(x: Tensor, finite: bool, rotation: Rotation | None, current: Tensor | None) -> Tensor:
    """Return the bits of max|x|, or of the transform of x, int32 [1]."""
    M, K = x.shape
    bits, shape = torch.zeros(1, dtype=torch.int32, device=x.device), SHAPES["amax"]
    signs, signs_loaded, number = _signs(rotation, x)
    launch(
        amax_kernel, (-(-K // shape.cols), -(-M // shape.rows)),
        (x, bits, signs, bits if current is None else current), (M,), (number,),
        {
            "FINITE": finite, "ROTATED": rotation is not None, "SIGNS_LOADED": signs_loaded,
            "GUARDED": current is not None,
            "K": K, "x_stride": x.stride(0), "R": shape.rows, "C": shape.cols, "WIDE": shape.wide,
        },
        {"num_warps": shape.warps},
    )  # fmt: skip
    return bits


def _signs(rotation: Rotation | None, unused: Tensor) -> tuple[Tensor, bool, int]:
    """Return the signs in memory (``unused`` if they are a number), whether they are in memory, and the number."""
    signs = 0 if rotation is None else rotation.signs
    return (signs, True, 0) if isinstance(signs, Tensor) else (unused, False, signs)
