"""The function of ``../exact.py`` by Triton kernels, one launch for each operand: same arguments and results.

Formats with a scale for the whole tensor read the matrix once more, for its amax. Import this module only where Triton
can run: on CUDA, or on a CPU with ``TRITON_INTERPRET=1`` (slow; for tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.quantization.exact import CachedExactPair, ExactOperand, ExactPair, shared
from snip_megatron.quantization.formats import E2M1, SPECS, STOCHASTIC, Scaling, resolve
from snip_megatron.quantization.hadamard import POINTS, Rotation, is_turned
from snip_megatron.quantization.kernels.arguments import key_arguments
from snip_megatron.quantization.kernels.exact_programs import amax_kernel, side_kernel
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.rounding import Key

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (Scaling.E4M3_FP32, Scaling.FP32_TENSOR)


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
"""Kind of a launch → its shape: the one table to edit for another GPU (``benchmarks/kernels/emulated_sweep.py``)."""


@dataclass(frozen=True)
class _Side:
    """One operand and how it is made.

    Attributes:
        format: the number format.
        operand: where its numbers go.
        tile: (rows, columns) that share a scale.
        seed: key of stochastic rounding.
        rotation: how the matrix is transformed first; None: not at all.
    """

    format: Format
    operand: ExactOperand
    tile: tuple[int, int]
    seed: Key | None
    rotation: Rotation | None


def quantize_exact(
    x: Tensor,
    row_format: Format | str | None,
    col_format: Format | str | None,
    *,
    square: bool = False,
    row_seed: Key | None = None,
    col_seed: Key | None = None,
    cols: Tensor | None = None,
    amax: Tensor | None = None,
    rotation: Rotation | None = None,
    held: CachedExactPair | None = None,
) -> ExactPair:
    """See :func:`snip_megatron.quantization.exact.quantize_exact`."""
    x = _checked(x)
    row, col = (None if f is None else resolve(f) for f in (row_format, col_format))
    both = shared(row, col, square=square)
    kept = (None, None) if held is None else held.operands
    current = None if held is None else held.current
    sides = [
        None if fmt is None else _side(x, fmt, axis, square, seed, old, rotation)
        for fmt, axis, seed, old in ((row, 1, row_seed, kept[0]), (None if both else col, 0, col_seed, kept[1]))
    ]
    found: dict[tuple[bool, bool], Tensor] = {}  # (over finite numbers, of the transform) → amax
    for side in sides:
        if side is not None and x.numel():
            bits = x
            if SPECS[side.format].scaling in _WHOLE:
                given = amax if side.rotation is None else side.rotation.amax
                kind = (SPECS[side.format].scaling is Scaling.E4M3_FP32, side.rotation is not None)
                if kind not in found:
                    found[kind] = _amax(x, *kind, side.rotation, current) if given is None else _bits(given)
                bits = found[kind]
            _quantize(x, side, bits, cols, current)
    first, second = (None if side is None else side.operand for side in sides)
    return first, first if both else second


def _side(
    x: Tensor, fmt: Format, axis: int, square: bool, seed: Key | None, kept: ExactOperand | None,
    rotation: Rotation | None,
) -> _Side:  # fmt: skip
    spec = SPECS[fmt]
    rotation = (rotation or Rotation()) if is_turned(fmt, axis, weight=square) else None
    tile = spec.tile_shape(axis, square) if spec.tile else (1, 1)
    if kept is None:
        height = x.shape[0] if rotation is None else -(-x.shape[0] // POINTS) * POINTS
        values = torch.empty(height, x.shape[1], dtype=torch.bfloat16, device=x.device)
        scale = None
        if spec.scaling is Scaling.FP32:
            scale = torch.empty(-(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1]), device=x.device)
        elif spec.scaling in _WHOLE:
            scale = torch.empty(1, device=x.device) if x.numel() else torch.ones(1, device=x.device)
        kept = ExactOperand(values, scale, tile if spec.scaling is Scaling.FP32 else None)
    return _Side(fmt, kept, tile, seed if fmt in STOCHASTIC else None, rotation)


def _quantize(x: Tensor, side: _Side, amax: Tensor, cols: Tensor | None, current: Tensor | None) -> None:
    (M, K), spec = x.shape, SPECS[side.format]
    if side.seed is None:
        cols = x
    elif cols is None:
        cols = torch.arange(K, device=x.device)
    scale, key = side.operand.scale, side.seed if isinstance(side.seed, Tensor) else x
    signs, signs_loaded, number = _signs(side.rotation, x)
    tensors = (x, side.operand.values, x if scale is None else scale, amax, cols, key, signs,
               x if current is None else current)  # fmt: skip
    dtypes = tuple(torch.int16 if i == 1 else t.dtype for i, t in enumerate(tensors))  # bf16 is written as words
    shape = SHAPES["tiles of 128" if spec.scaling is Scaling.FP32 else "columns" if side.tile[0] > 1 else "rows"]
    rows = max(shape.rows, side.tile[0])
    launch(
        side_kernel, (-(-K // shape.cols), -(-M // rows)), tensors, dtypes,
        (M,), (*key_arguments(side.seed), number),
        {
            "ELEMENT": 4 if spec.element is E2M1 else 8, "SCALING": spec.scaling.value,
            "TILE_ROWS": side.tile[0], "TILE_COLS": side.tile[1],
            "RANDOM": side.seed is not None, "KEY_LOADED": isinstance(side.seed, Tensor), "FOUR": spec.four_over_six,
            "TURNED": side.rotation is not None, "SIGNS_LOADED": signs_loaded, "GUARDED": current is not None,
            "K": K, "x_stride": x.stride(0), "R": rows, "C": shape.cols, "WIDE": shape.wide,
        },
        {"num_warps": shape.warps},
    )  # fmt: skip


def _amax(x: Tensor, finite: bool, turned: bool, rotation: Rotation | None, current: Tensor | None) -> Tensor:
    """Return the bits of max|x|, or of the transform of x, int32 [1]."""
    M, K = x.shape
    bits, shape = torch.zeros(1, dtype=torch.int32, device=x.device), SHAPES["amax"]
    signs, signs_loaded, number = _signs(rotation, x)
    tensors = (x, bits, signs, bits if current is None else current)
    launch(
        amax_kernel, (-(-K // shape.cols), -(-M // shape.rows)), tensors, tuple(t.dtype for t in tensors),
        (M,), (number,),
        {
            "FINITE": finite, "TURNED": turned, "SIGNS_LOADED": signs_loaded, "GUARDED": current is not None,
            "K": K, "x_stride": x.stride(0), "R": shape.rows, "C": shape.cols, "WIDE": shape.wide,
        },
        {"num_warps": shape.warps},
    )  # fmt: skip
    return bits


def _bits(amax: Tensor) -> Tensor:
    return amax.detach().to(torch.float32).reshape(1).view(torch.int32)


def _signs(rotation: Rotation | None, unused: Tensor) -> tuple[Tensor, bool, int]:
    """Return the signs of a transform as a tensor, whether they are there, and as a number otherwise."""
    signs = 0 if rotation is None else rotation.signs
    return (signs, True, 0) if isinstance(signs, Tensor) else (unused, False, signs)


def _checked(x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise SnipError(f"quantisation takes a 2-D tensor [rows, cols], not shape {tuple(x.shape)}: flatten it first")
    if x.dtype not in _DTYPES:
        raise SnipError(f"quantisation takes fp32, bf16 or fp16, not {x.dtype}")
    x = x.detach()
    return x if x.stride(1) == 1 else x.contiguous()
