"""Reference quantisers in plain torch: exact, differentiable nowhere, fast enough to train small models on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.quantization.formats import E4M3, SPECS, FormatSpec, Scaling, resolve
from snip_megatron.quantization.rounding import random_bits, round_to_element

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRANULARITIES = ("tile", "block")
ROUNDINGS = ("nearest", "stochastic")
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Quantized:
    """A quantised matrix.

    Attributes:
        values: FP32 [rows, cols], numbers of the element format.
        scale: FP32 [ceil(rows/tile[0]), ceil(cols/tile[1])], what a value is multiplied by.
        tile: (rows, columns) that share a scale.
    """

    values: Tensor
    scale: Tensor
    tile: tuple[int, int]

    def dequantize(self) -> Tensor:
        """FP32 [rows, cols]: values · scale."""
        rows, cols = self.values.shape
        tiled = _tiled(_padded(self.values, self.tile), self.tile)
        return _cropped(_untiled(tiled * self.scale[:, None, :, None]), rows, cols)


def quantize_dequantize(
    x: Tensor,
    format: Format | str,
    granularity: str = "tile",
    *,
    rounding: str = "nearest",
    seed: int | None = None,
    offset: tuple[int, int] = (0, 0),
) -> Tensor:
    """Quantise ``x`` and bring it back: the numbers that a GEMM in ``format`` sees.

    Args:
        x: fp32, bf16 or fp16 [rows, cols].
        format: "fp4", "fp8", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8" or a quantised :class:`Format`.
        granularity: "tile" (1×128 along the last dimension) or "block" (128×128). fp8_tensor, mxfp4 and mxfp8 ignore
            it (whole tensor; 1×32); nvfp4 has 1×16 and 16×16.
        rounding: "nearest" (ties to even) or "stochastic".
        seed: 64-bit seed, required by stochastic rounding.
        offset: global (row, column) of ``x[0, 0]``: shards then draw what the whole tensor would.

    Returns:
        FP32 [rows, cols]. A NaN or Inf makes its tile NaN; a zero tile stays zero.

    Raises:
        SnipError: unknown format, granularity or rounding; not 2-D; another dtype; a missing seed.
    """
    if granularity not in GRANULARITIES:
        raise SnipError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
    return fake_quantize(x, format, block=granularity == "block", rounding=rounding, seed=seed, offset=offset)


def fake_quantize(
    x: Tensor,
    format: Format | str,
    *,
    axis: int = -1,
    block: bool = False,
    rounding: str = "nearest",
    seed: int | None = None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    tensor_amax: Tensor | None = None,
) -> Tensor:
    """:func:`quantize_dequantize` with what the linears need beyond it.

    Args:
        axis: dimension along which tiles run: -1 or 1 (last) or 0 (wgrad's operands, tiles along tokens). Random draws
            belong to the element (row, column), whatever the axis.
        block: square blocks instead of tiles, where the format has them.
        rows, cols: explicit global ids (1-D integer tensors) in place of ``offset``, for shards that are not
            contiguous.
        tensor_amax: max|x| of the whole tensor (0-dim), for fp8_tensor and nvfp4 on a shard; default: that of ``x``.
    """
    spec = _validated(x, format, axis)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.float32, device=x.device)
    bits = _draws(x, rounding, seed, offset, rows, cols)
    tile = _tile(spec, x, axis, block)
    y, scale = _encode(x, spec, tile, bits, tensor_amax)
    y.mul_(scale)
    return _cropped(_untiled(y), *x.shape)


def quantize(
    x: Tensor,
    format: Format | str,
    *,
    axis: int = -1,
    block: bool = False,
    rounding: str = "nearest",
    seed: int | None = None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    tensor_amax: Tensor | None = None,
) -> Quantized:
    """The two halves of :func:`fake_quantize`: element values and scales. Same arguments and errors."""
    spec = _validated(x, format, axis)
    tile = _tile(spec, x, axis, block)
    if x.numel() == 0:
        shape = tuple(-(-size // edge) for size, edge in zip(x.shape, tile, strict=True))
        return Quantized(x.to(torch.float32), torch.ones(shape, device=x.device), tile)
    bits = _draws(x, rounding, seed, offset, rows, cols)
    y, scale = _encode(x, spec, tile, bits, tensor_amax)
    return Quantized(_cropped(_untiled(y), *x.shape), scale[:, 0, :, 0], tile)


def squared_error(x: Tensor, xq: Tensor, dim: int | None = None) -> Tensor:
    """‖xq − x‖² in float64: over everything (0-dim), or summed along ``dim`` ([cols] for 0, [rows] for 1)."""
    error = xq.to(torch.float32) - x.to(torch.float32)
    # Squares of FP32 are accumulated in float64, so tiny errors under a large one still count.
    squares = error.to(torch.float64).square_()
    return squares.sum() if dim is None else squares.sum(dim)


def _validated(x: Tensor, format: Format | str, axis: int) -> FormatSpec:
    spec = SPECS[resolve(format)]
    if x.dim() != 2:
        raise SnipError(f"quantisation takes a 2-D tensor [rows, cols], not shape {tuple(x.shape)}: flatten it first")
    if x.dtype not in _INPUT_DTYPES:
        raise SnipError(f"quantisation takes fp32, bf16 or fp16, not {x.dtype}")
    if axis not in (-1, 0, 1):
        raise SnipError(f"quantisation axis must be -1, 0 or 1, not {axis}")
    return spec


def _tile(spec: FormatSpec, x: Tensor, axis: int, block: bool) -> tuple[int, int]:
    if spec.scaling is Scaling.FP32_TENSOR:
        return max(x.shape[0], 1), max(x.shape[1], 1)
    return spec.tile_shape(axis, block)


def _draws(
    x: Tensor, rounding: str, seed: int | None, offset: tuple[int, int], rows: Tensor | None, cols: Tensor | None
) -> Tensor | None:
    """Random bits [rows, cols] of stochastic rounding, None for nearest."""
    if rounding not in ROUNDINGS:
        raise SnipError(f"rounding {rounding!r} is not one of {', '.join(ROUNDINGS)}")
    if rounding == "nearest":
        return None
    if seed is None:
        raise SnipError("stochastic rounding needs a seed")
    ids = []
    for name, given, size, start in (("rows", rows, x.shape[0], offset[0]), ("cols", cols, x.shape[1], offset[1])):
        if given is None:
            given = torch.arange(start, start + size, device=x.device)
        elif given.shape != (size,):
            raise SnipError(f"stochastic rounding: {name} has shape {tuple(given.shape)}, expected ({size},)")
        ids.append(given)
    return random_bits(seed, ids[0], ids[1])


def _encode(
    x: Tensor, spec: FormatSpec, tile: tuple[int, int], bits: Tensor | None, tensor_amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Element values in tiles [row tiles, tile rows, column tiles, tile columns] (own memory) and scales to match."""
    tiled = _tiled(_padded(x.detach().to(torch.float32), tile), tile)
    amax = _amax(tiled)
    if spec.scaling is Scaling.FP32_TENSOR and tensor_amax is not None:
        amax = tensor_amax.to(torch.float32).view(1, 1, 1, 1)
    divisor, scale = _scales(amax, spec, tensor_amax)
    if bits is None:
        return round_to_element(tiled / divisor, spec.element), scale
    bits = _tiled(_padded(bits, tile), tile)
    return round_to_element(_times_reciprocal(tiled, divisor), spec.element, bits), scale


def _times_reciprocal(x: Tensor, divisor: Tensor) -> Tensor:
    """x · (1 / divisor), the reciprocal to nearest, the product to zero: as much as stochastic rounding can tell.

    A subnormal divisor has few bits, so that the largest x of its tile may exceed the format: its reciprocal is made
    smaller by 2^-12.
    """
    mantissa, exponent = torch.frexp(divisor)  # so that no reciprocal overflows
    inverse = torch.where(divisor < _SMALLEST_NORMAL, (1.0 / mantissa) * (1.0 - 2.0**-12), 1.0 / mantissa)
    reciprocal = torch.ldexp(inverse.to(torch.float64), -exponent)
    product = x.to(torch.float64).mul_(torch.where(divisor.isinf(), 0.0, reciprocal))  # exact
    nearest = product.to(torch.float32)
    above = nearest.abs().to(torch.float64) > product.abs_()
    return nearest.view(torch.int32).sub_(above.to(torch.int32)).view(torch.float32)


def _amax(tiled: Tensor) -> Tensor:
    """max|x| of each tile, NaN where it holds one: two reductions and no |x| in memory."""
    high, low = tiled, tiled
    for dim in (3, 1):
        if tiled.shape[dim] > 1:
            high, low = high.amax(dim, keepdim=True), low.amin(dim, keepdim=True)
    return high.abs() if high is tiled else torch.maximum(high, low.neg())


def _scales(amax: Tensor, spec: FormatSpec, tensor_amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """(what x is divided by, what the value is multiplied by); they differ only where a stored scale is zero."""
    if spec.scaling is Scaling.E8M0:
        scale = _e8m0_scale(amax, spec.element.max_exponent)
        return scale, scale
    if spec.scaling is Scaling.E4M3_FP32:
        return _nvfp4_scales(amax, spec.element.maximum, tensor_amax)
    scale = torch.where(amax.isinf(), torch.nan, _nonzero(_divided(amax, spec.element.maximum)))
    return scale, scale


def _divided(x: Tensor, number: float) -> Tensor:
    """x / number as IEEE division: by a Python number, CUDA would multiply by the reciprocal."""
    return x / torch.full((), number, dtype=torch.float32, device=x.device)


def _nonzero(scale: Tensor) -> Tensor:
    """1 in place of 0: zero tiles, and those whose amax / maximum underflows FP32 (below 3.2e-43): they become zero."""
    return torch.where(scale == 0, 1.0, scale)


def _e8m0_scale(amax: Tensor, max_exponent: int) -> Tensor:
    """2^(floor(log2 amax) − emax), the rule of OCP MX 1.0 §6.3, clamped to E8M0's 2^-127 … 2^127; zero tile: 1."""
    exponent = (amax.view(torch.int32) >> 23).sub_(127 + max_exponent).clamp_(min=-127)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def _nvfp4_scales(amax: Tensor, maximum: float, tensor_amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """FP32 tensor scale amax/(maximum·448) times an E4M3 tile scale.

    The tensor's amax is taken over the tiles that are finite, so that a NaN or Inf stays in its tile. A tile whose E4M3
    scale rounds to zero is zero after dequantisation (its divisor is infinite), as on the hardware.
    """
    if tensor_amax is None:
        tensor_amax = torch.where(torch.isfinite(amax), amax, 0.0).amax()
    tensor_scale = _nonzero(_divided(tensor_amax.to(torch.float32), maximum * E4M3.maximum))
    tile_scale = round_to_element(_divided(amax, maximum) / tensor_scale, E4M3)
    scale = torch.where(torch.isfinite(amax), tile_scale * tensor_scale, torch.nan)
    return torch.where(scale == 0, torch.inf, scale), scale


def _padded(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Zero-padded to whole tiles; zeros change no amax. No copy where the shape divides."""
    below, right = -x.shape[0] % tile[0], -x.shape[1] % tile[1]
    return functional.pad(x, (0, right, 0, below)) if below or right else x


def _tiled(x: Tensor, tile: tuple[int, int]) -> Tensor:
    return x.view(x.shape[0] // tile[0], tile[0], x.shape[1] // tile[1], tile[1])


def _untiled(tiled: Tensor) -> Tensor:
    return tiled.flatten(2, 3).flatten(0, 1)


def _cropped(x: Tensor, rows: int, cols: int) -> Tensor:
    return x if x.shape == (rows, cols) else x[:rows, :cols].contiguous()
