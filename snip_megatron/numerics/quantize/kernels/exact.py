"""The function of ``../exact.py`` by Triton kernels, one launch for each operand: same arguments and results.

Formats with a scale for the whole tensor read the matrix once more, for its amax.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.exact import ExactOperand, shared
from snip_megatron.numerics.quantize.formats import E2M1, SPECS, Scaling
from snip_megatron.numerics.quantize.hadamard import POINTS, Rotation, is_turned
from snip_megatron.numerics.quantize.kernels.arguments import bits_of, checked, key_arguments, key_memory
from snip_megatron.numerics.quantize.kernels.exact_programs import amax_kernel, side_kernel
from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.precision import Format

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


def quantize_exact(x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.exact.quantize_exact`."""
    x, both = checked(x), shared(spec)
    operands: list[Any] = [None, None] if cached is None else [*cached.operands]
    current = None if cached is None else cached.current
    found: dict[tuple[bool, bool], Tensor] = {}  # (over finite numbers, of the transform) → amax
    for place, fmt in enumerate(spec.formats):
        if fmt is None or (both and place == 1):
            continue
        rotation = None
        if is_turned(fmt, 1 - place, weight=spec.weight):
            rotation = spec.rotation or Rotation()
        if operands[place] is None:
            operands[place] = _output(x, fmt, 1 - place, spec, rotation)
        if not x.numel():
            continue
        bits, scaling = x, SPECS[fmt].scaling
        if scaling in _WHOLE:
            given = spec.amax if rotation is None else rotation.amax
            kind = (scaling is Scaling.E4M3_FP32, rotation is not None)
            if kind not in found:
                found[kind] = _amax(x, kind[0], rotation, current) if given is None else bits_of(given)
            bits = found[kind]
        _quantize(x, place, spec, operands[place], rotation, bits, current)
    return operands[0], operands[0] if both else operands[1]


def _output(x: Tensor, fmt: Format, axis: int, spec: OperandSpec, rotation: Rotation | None) -> ExactOperand:
    """Return memory for an operand; a scale that nothing will write is 1."""
    (M, K), of_format = x.shape, SPECS[fmt]
    height = M if rotation is None else -(-M // POINTS) * POINTS
    values = torch.empty(height, K, dtype=torch.bfloat16, device=x.device)
    if of_format.scaling is Scaling.FP32:
        tile = of_format.tile_shape(axis, spec.weight)
        return ExactOperand(values, torch.empty(-(-M // tile[0]), -(-K // tile[1]), device=x.device), tile)
    whole = of_format.scaling in _WHOLE
    return ExactOperand(values, (torch.empty if x.numel() else torch.ones)(1, device=x.device) if whole else None, None)


def _quantize(
    x: Tensor,
    place: int,
    spec: OperandSpec,
    operand: ExactOperand,
    rotation: Rotation | None,
    amax: Tensor,
    current: Tensor | None,
) -> None:
    """Write one operand of x, the rowwise (``place`` 0) or the columnwise one (1)."""
    (M, K), fmt, seed, cols = x.shape, spec.formats[place], spec.seeds[place], x
    assert fmt is not None
    of_format = SPECS[fmt]
    tile = of_format.tile_shape(1 - place, spec.weight) if of_format.tile else (1, 1)
    if seed is not None and spec.keys is not None:
        cols = torch.arange(K, device=x.device) if spec.keys.cols is None else spec.keys.cols
    signs, signs_loaded, number = _signs(rotation, x)
    shape = SHAPES["tiles of 128" if of_format.scaling is Scaling.FP32 else "columns" if tile[0] > 1 else "rows"]
    rows = max(shape.rows, tile[0])
    launch(
        side_kernel, (-(-K // shape.cols), -(-M // rows)),
        [
            x, (operand.values, torch.int16), x if operand.scale is None else operand.scale, amax, cols,
            key_memory(seed, x), signs, x if current is None else current,
        ],
        (M,), (*key_arguments(seed), number),
        {
            "ELEMENT": 4 if of_format.element is E2M1 else 8, "SCALING": of_format.scaling.value,
            "TILE_ROWS": tile[0], "TILE_COLS": tile[1],
            "RANDOM": seed is not None, "KEY_LOADED": isinstance(seed, Tensor), "FOUR": of_format.four_over_six,
            "TURNED": rotation is not None, "SIGNS_LOADED": signs_loaded, "GUARDED": current is not None,
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
            "FINITE": finite, "TURNED": rotation is not None, "SIGNS_LOADED": signs_loaded,
            "GUARDED": current is not None,
            "K": K, "x_stride": x.stride(0), "R": shape.rows, "C": shape.cols, "WIDE": shape.wide,
        },
        {"num_warps": shape.warps},
    )  # fmt: skip
    return bits


def _signs(rotation: Rotation | None, unused: Tensor) -> tuple[Tensor, bool, int]:
    """Return the signs of a transform as a tensor, whether they are there, and as a number otherwise."""
    signs = 0 if rotation is None else rotation.signs
    return (signs, True, 0) if isinstance(signs, Tensor) else (unused, False, signs)
