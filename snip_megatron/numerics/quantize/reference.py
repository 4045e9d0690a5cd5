"""The reference quantisers and the Hadamard transform, in plain torch. They define the bits of every format.

They have no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.numerics.quantize.formats import E4M3, SPECS, FormatSpec, Scaling, resolve
from snip_megatron.numerics.quantize.rounding import Key, random_bits, round_to_element
from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, quoted

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRANULARITIES = ("tile", "block")
ROUNDINGS = ("nearest", "stochastic")

Factors = tuple[Tensor, Tensor]
"""The factors of nvfp4's scales: the E4M3 scales of tiles, in FP32, and the FP32 scale of the tensor, 0-dim."""


@dataclass(frozen=True)
class Quantized:
    """A quantised matrix."""

    values: Tensor  # FP32 [rows, cols], numbers of the element type
    scale: Tensor  # FP32 [ceil(rows/tile[0]), ceil(cols/tile[1])], the scale of each tile
    tile: tuple[int, int]  # (rows, columns) that share a scale
    # the two factors of ``scale`` in formats whose tiles have E4M3 scales: the E4M3 scales of the tiles in the shape of
    # ``scale``, and the scale of the whole tensor, 0-dim. Both are FP32. None in other formats
    factors: Factors | None = None

    def dequantize(self) -> Tensor:
        """Return values · scale, FP32 [rows, cols]."""
        rows, cols = self.values.shape
        tiled = _tiled(_padded(self.values, self.tile), self.tile)
        return _cropped(_untiled(tiled * self.scale[:, None, :, None]), rows, cols)


def of_elements(tiles: Tensor, tile: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """Return the number of each element's tile, [rows, cols] of ``shape``, from one number for each tile."""
    rows, cols = shape
    return tiles.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :cols]


def quantize_dequantize(
    x: Tensor,
    format: Format | str,
    granularity: str = "tile",
    *,
    rounding: str = "nearest",
    seed: int | None = None,
    offset: tuple[int, int] = (0, 0),
) -> Tensor:
    """Quantise ``x`` and dequantise it. The result is what a GEMM in ``format`` multiplies.

    Raises SnipError if the format, granularity or rounding is unknown, ``x`` is not 2-D or has another dtype, or a seed
    is missing.

    Args:
        x: fp32, bf16 or fp16 [rows, cols].
        format: "fp4", "fp8", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8" or a quantised :class:`Format`.
        granularity: "tile" (1×128 along the last dimension) or "block" (128×128). nvfp4 has tiles of 1×16 and blocks of
            16×16. fp8_tensor (one scale for the tensor), mxfp4 and mxfp8 (1×32) ignore the granularity.
        rounding: "nearest" (ties to even) or "stochastic".
        seed: 64-bit seed, required by stochastic rounding.
        offset: global (row, column) of ``x[0, 0]``. A shard then gets the random draws of its part of the whole tensor.

    Returns:
        FP32 [rows, cols]. A tile with a NaN or Inf becomes NaN. A zero tile stays zero.
    """
    if granularity not in GRANULARITIES:
        raise SnipError(f"granularity {quoted(granularity)} is not one of {', '.join(GRANULARITIES)}")
    return fake_quantize(x, format, block=granularity == "block", rounding=rounding, seed=seed, offset=offset)


def fake_quantize(x: Tensor, format: Format | str, **options: Any) -> Tensor:
    """Quantise ``x`` and dequantise it, FP32 [rows, cols]. Arguments and errors are those of :func:`quantize`."""
    return quantize(x, format, **options).dequantize()


def quantize(
    x: Tensor,
    format: Format | str,
    *,
    axis: int = -1,
    block: bool = False,
    rounding: str = "nearest",
    seed: Key | None = None,
    offset: tuple[int, int] = (0, 0),
    cols: Tensor | None = None,
    tensor_amax: Tensor | None = None,
) -> Quantized:
    """Quantise ``x``, with the options that quantised linears need.

    Raises SnipError as :func:`quantize_dequantize`.

    Args:
        x: fp32, bf16 or fp16 [rows, cols].
        format: a quantised format.
        axis: dimension along which tiles run: -1 or 1 (the last dimension), or 0 (tiles along tokens, for the operands
            of wgrad). The random draw of an element does not depend on it.
        block: use square blocks instead of tiles, where the format has them.
        rounding: "nearest" (ties to even) or "stochastic".
        seed: 64-bit seed, or key words on the device. Required by stochastic rounding.
        offset: global (row, column) of ``x[0, 0]``.
        cols: 1-D integer tensor of global column ids that replaces the offset, for shards that are not contiguous.
        tensor_amax: max|x| of the whole tensor (0-dim), for fp8_tensor and nvfp4 on a shard. Default: that of ``x``.
    """
    spec = SPECS[resolve(format)]
    check_matrix(x)
    if axis not in (-1, 0, 1):
        raise SnipError(f"quantisation axis must be -1, 0 or 1, not {axis}")
    if rounding not in ROUNDINGS:
        raise SnipError(f"rounding {quoted(rounding)} is not one of {', '.join(ROUNDINGS)}")
    tile = spec.tile_shape(axis, block)
    if spec.scaling is Scaling.FP32_TENSOR:
        tile = max(x.shape[0], 1), max(x.shape[1], 1)
    tiled = _tiled(_padded(x.detach().to(torch.float32), tile), tile)
    if x.numel() == 0:
        # New memory, not ``tiled``, which is x itself: callers change values in place.
        scale = torch.ones(tiled.shape[0], tiled.shape[2], device=x.device)
        whole = torch.zeros((), device=x.device) if tensor_amax is None else tensor_amax
        factors = (scale, _tensor_scale(whole, spec)) if spec.scaling is Scaling.E4M3_FP32 else None
        return Quantized(torch.empty(x.shape, device=x.device), scale, tile, factors)
    draws = None
    if rounding == "stochastic":
        draws = _tiled(_padded(_random_bits(x, seed, offset, cols), tile), tile)
    amax = _amax(tiled)
    if spec.scaling is Scaling.FP32_TENSOR and tensor_amax is not None:
        amax = tensor_amax.to(torch.float32).view(1, 1, 1, 1)
    scale, factors = _scales(amax, spec, tensor_amax, tiled)
    values = round_to_element(tiled / _divisor(scale), spec.element, draws)
    if factors is not None:  # the amax of a tile of negative zeros may be a negative zero
        factors = factors[0][:, 0, :, 0].abs(), factors[1]
    return Quantized(_cropped(_untiled(values), *x.shape), scale[:, 0, :, 0], tile, factors)


def check_matrix(x: Tensor) -> None:
    """Raise SnipError if x is no matrix of floats that can be quantised."""
    if x.dim() != 2:
        raise SnipError(f"quantisation takes a 2-D tensor [rows, cols], not shape {tuple(x.shape)}: flatten it first")
    if x.dtype not in _INPUT_DTYPES:
        raise SnipError(f"quantisation takes fp32, bf16 or fp16, not {x.dtype}")


def _random_bits(x: Tensor, seed: Key | None, offset: tuple[int, int], cols: Tensor | None) -> Tensor:
    """Return the random bits [rows, cols] of stochastic rounding."""
    if seed is None:
        raise SnipError("stochastic rounding needs a seed")
    rows, count = x.shape
    if cols is None:
        cols = torch.arange(offset[1], offset[1] + count, device=x.device)
    elif cols.shape != (count,):
        raise SnipError(f"stochastic rounding: cols has shape {tuple(cols.shape)}, expected ({count},)")
    return random_bits(seed, torch.arange(offset[0], offset[0] + rows, device=x.device), cols)


def _amax(tiled: Tensor) -> Tensor:
    """Return max|x| of each tile, or NaN if the tile holds a NaN. Reduces x twice instead of materialising |x|."""
    high, low = tiled, tiled
    for dim in (3, 1):
        if tiled.shape[dim] > 1:
            high, low = high.amax(dim, keepdim=True), low.amin(dim, keepdim=True)
    return high.abs() if high is tiled else torch.maximum(high, low.neg())


def _scales(amax: Tensor, spec: FormatSpec, tensor_amax: Tensor | None, tiled: Tensor) -> tuple[Tensor, Factors | None]:
    """Return the scales of tiles and their factors. Only those of nvfp4 may be zero."""
    if spec.scaling is Scaling.E8M0:
        return _e8m0_scale(amax, spec.element.max_exponent), None
    if spec.scaling is Scaling.E4M3_FP32:
        factors = _nvfp4_factors(amax, spec, tensor_amax, tiled)
        return factors[0] * factors[1], factors
    return torch.where(amax.isinf(), torch.nan, _nonzero(_divided(amax, spec.element.maximum))), None


def _divided(x: Tensor, number: float) -> Tensor:
    """Return x / number as an IEEE division. CUDA would multiply by the reciprocal of a Python number."""
    return x / torch.full((), number, dtype=torch.float32, device=x.device)


def _nonzero(scale: Tensor) -> Tensor:
    """Replace a scale of 0 by 1. Its tile is zero, or becomes zero because amax / maximum underflows FP32."""
    return torch.where(scale == 0, 1.0, scale)


def _e8m0_scale(amax: Tensor, max_exponent: int) -> Tensor:
    """Return 2^(floor(log2 amax) − emax), clamped to 2^-127 … 2^127 (OCP MX 1.0 §6.3). A zero tile has scale 1."""
    exponent = (amax.view(torch.int32) >> 23).sub_(127 + max_exponent).clamp_(min=-127)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def _divisor(scale: Tensor) -> Tensor:
    """Return the divisors of tiles. A tile whose scale rounds to zero becomes zero, as on the hardware."""
    return torch.where(scale == 0, torch.inf, scale)


def _nvfp4_factors(amax: Tensor, spec: FormatSpec, tensor_amax: Tensor | None, tiled: Tensor) -> Factors:
    """Return the factors of nvfp4's scales, from the amaxes of tiles and of the tensor (None: that of ``tiled``, x).

    The amax of the tensor is that of its finite numbers, so that a NaN or Inf affects its tile only.
    """
    if tensor_amax is None:
        tensor_amax = tiled.nan_to_num(0.0, 0.0, 0.0).abs_().amax()
    tensor_scale = _tensor_scale(tensor_amax, spec)
    tile_scale = round_to_element(_divided(amax, spec.element.maximum) / tensor_scale, E4M3)
    if spec.four_over_six:
        other = round_to_element(_divided(amax, 4.0) / tensor_scale, E4M3)
        error, other_error = (_squared_error(tiled, scale, tensor_scale, spec) for scale in (tile_scale, other))
        tile_scale = torch.where((other_error < error) | (tile_scale == 0), other, tile_scale)
    return torch.where(torch.isfinite(amax), tile_scale, torch.nan), tensor_scale


def _tensor_scale(tensor_amax: Tensor, spec: FormatSpec) -> Tensor:
    """Return nvfp4's scale of a tensor, amax / (6 · largest scale)."""
    return _nonzero(_divided(tensor_amax.to(torch.float32), spec.element.maximum * spec.largest_scale))


_ERROR_STEP, _LARGEST_ERROR = 2.0**-20, 2.0**26


def _squared_error(tiled: Tensor, tile_scale: Tensor, tensor_scale: Tensor, spec: FormatSpec) -> Tensor:
    """Return Σ (Q(x) − x)² of each tile over the square of the tensor's scale.

    Squared errors are rounded down to multiples of 2^-20, whose sum is the same in any order, so that kernels choose
    alike.
    """
    y = tiled / _divisor(tile_scale * tensor_scale)
    error = (round_to_element(y.clone(), spec.element) - y).square_().div_(_ERROR_STEP)
    total = (
        error.nan_to_num_(0.0).clamp_(max=_LARGEST_ERROR).to(torch.int32).sum((1, 3), keepdim=True, dtype=torch.int32)
    )
    return total.to(torch.float32) * tile_scale * tile_scale


def _padded(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Pad with zeros to whole tiles. Returns ``x`` itself if no padding is needed. Zeros change no amax."""
    below, right = -x.shape[0] % tile[0], -x.shape[1] % tile[1]
    return functional.pad(x, (0, right, 0, below)) if below or right else x


def _tiled(x: Tensor, tile: tuple[int, int]) -> Tensor:
    return x.view(x.shape[0] // tile[0], tile[0], x.shape[1] // tile[1], tile[1])


def _untiled(tiled: Tensor) -> Tensor:
    return tiled.flatten(2, 3).flatten(0, 1)


def _cropped(x: Tensor, rows: int, cols: int) -> Tensor:
    return x if x.shape == (rows, cols) else x[:rows, :cols].contiguous()


# -- Hadamard transform ------------------------------------------------------------------------------------------------
# In ∇W = Gᵀ·X both operands are multiplied by the same orthogonal matrix, H₁₆/4 for each group of 16 tokens. The
# product stays the same, and an outlier is spread over its group, so that tiles are quantised with smaller errors. Each
# row of a group may first be multiplied by ±1. An incomplete last group is padded with zeros.

POINTS = 16  # rows of a group

Signs = int | Tensor
"""A number in [0, 2^16), or an int32 tensor [1] on the device. If bit i is set, row i of every group changes its sign.
"""


@dataclass(frozen=True)
class Rotation:
    """How an operand of wgrad is transformed."""

    signs: Signs = 0  # sign changes, which must be the same for both operands of a product
    # max|·| of the transformed unsharded matrix, 0-dim FP32, if a shard is transformed and the format has a scale for
    # the whole tensor. None: that of the transformed matrix itself
    amax: Tensor | None = None


ROTATED = frozenset(fmt for fmt, spec in SPECS.items() if spec.hadamard)
"""Formats in which the operands of wgrad are transformed."""


def is_rotated(format: Format | str | None, axis: int, *, weight: bool = False) -> bool:
    """Return whether an operand of a GEMM that reduces over ``axis`` (0 or 1) is transformed. Weights never are."""
    return format is not None and axis == 0 and not weight and SPECS[resolve(format)].hadamard


def rotate(x: Tensor, signs: Signs = 0) -> Tensor:
    """Transform groups of 16 rows of x [R, C], and return FP32 [⌈R/16⌉·16, C].

    Sums are computed between rows 8, 4, 2 and 1 apart, in this order, so that kernels compute the same bits.
    """
    x = functional.pad(x.detach().to(torch.float32), (0, 0, 0, -x.shape[0] % POINTS))
    groups, cols = x.shape[0] // POINTS, x.shape[1]
    word = signs.long() if isinstance(signs, Tensor) else signs
    flips = torch.bitwise_right_shift(word, torch.arange(POINTS, device=x.device)) & 1
    x = x.view(groups, POINTS, cols) * (1 - 2 * flips).to(torch.float32)[:, None]
    for apart in (8, 4, 2, 1):
        first, second = x.view(groups, POINTS // (2 * apart), 2, apart, cols).unbind(2)
        x = torch.stack((first + second, first - second), 2)
    return x.view(groups * POINTS, cols).mul_(0.25)


def rotate_operand(
    x: Tensor,
    format: Format | str,
    axis: int,
    rotation: Rotation | None,
    amax: Tensor | None,
    *,
    weight: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the matrix that ``format`` quantises for a GEMM that reduces over ``axis``, and the amax of its tensor.

    If the format has no Hadamard transform, they are ``x`` [R, C] and ``amax``, max|x| of the unsharded matrix.
    ``rotation`` says how x is transformed. None: without sign changes.
    """
    if not is_rotated(format, axis, weight=weight):
        return x, amax
    rotation = rotation or Rotation()
    return rotate(x, rotation.signs), rotation.amax
