"""The function of ``../exact.py`` by Triton kernels: same arguments and results, one read of the matrix.

Formats with a scale for the whole tensor read the matrix once more, for its amax. Import this module only where Triton
can run: on CUDA, or on a CPU with ``TRITON_INTERPRET=1`` (slow; for tests).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.quantization.exact import ExactOperand, ExactPair, HeldPair, shared
from snip_megatron.quantization.formats import E2M1, SPECS, STOCHASTIC, Scaling, resolve
from snip_megatron.quantization.hadamard import POINTS, Rotation, is_turned
from snip_megatron.quantization.kernels.arguments import key_arguments
from snip_megatron.quantization.kernels.exact_programs import exact_amax_kernel, exact_kernel
from snip_megatron.quantization.kernels.exact_shapes import SHAPES, kind_of
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.rounding import Key

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (Scaling.E4M3_FP32, Scaling.FP32_TENSOR)
_VALUES = (1, 4)  # places of the values among the kernel's tensors
_APART = 4  # distance of two amaxes in int32: 16 bytes, the alignment that kernels are compiled for


@dataclass(frozen=True)
class _Side:
    """One operand and how it is made.

    Attributes:
        format: the number format.
        operand: where its numbers go.
        seed: key of stochastic rounding.
        square: whether its tiles are square blocks.
        rotation: how the matrix is transformed first; None: not at all.
    """

    format: Format
    operand: ExactOperand
    seed: Key | None
    square: bool
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
    held: HeldPair | None = None,
) -> ExactPair:
    """See :func:`snip_megatron.quantization.exact.quantize_exact`."""
    x = _checked(x)
    row, col = (None if f is None else resolve(f) for f in (row_format, col_format))
    both = shared(row, col, square=square)
    kept = (None, None) if held is None else held.operands
    first = _side(x, row, 1, square, row_seed, kept[0], None)
    second = None if both else _side(x, col, 0, square, col_seed, kept[1], rotation or Rotation())
    if x.numel():
        _quantize(x, first, second, cols, amax, None if held is None else held.current)
    of_row = None if first is None else first.operand
    return of_row, of_row if both else None if second is None else second.operand


def _side(
    x: Tensor,
    fmt: Format | None,
    axis: int,
    square: bool,
    seed: Key | None,
    kept: ExactOperand | None,
    rotation: Rotation | None,
) -> _Side | None:
    if fmt is None:
        return None
    spec = SPECS[fmt]
    blocks = square and spec.square_blocks
    if not is_turned(fmt, axis, weight=square):
        rotation = None
    if kept is None:
        shape = list(x.shape)
        if rotation is not None:
            shape[0] += -shape[0] % POINTS
        values = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
        scale, tile = None, None
        if spec.scaling is Scaling.FP32:
            tile = spec.tile_shape(axis, blocks)
            parts = (-(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1]))
            scale = torch.empty(parts, dtype=torch.float32, device=x.device)
        elif spec.scaling in _WHOLE:
            scale = torch.ones(1, device=x.device) if x.numel() == 0 else torch.empty(1, device=x.device)
        kept = ExactOperand(values, scale, tile)
    return _Side(fmt, kept, seed if fmt in STOCHASTIC else None, blocks, rotation)


def _quantize(
    x: Tensor, row: _Side | None, col: _Side | None, cols: Tensor | None, amax: Tensor | None, current: Tensor | None
) -> None:
    sides = [side for side in (row, col) if side is not None]
    if not sides:
        return
    M, K = x.shape
    amaxes = _amaxes(x, (row, col), amax, current)
    rows = max(_rows(side, row) for side in sides)
    shape = SHAPES[_kind(sides, rows)]
    ids = cols if cols is not None and any(side.seed is not None for side in sides) else None
    memory = [tensor for side, bits in zip((row, col), amaxes, strict=True) for tensor in _memory(side, bits, x)]
    keys = [side.seed if side is not None and isinstance(side.seed, Tensor) else x for side in (row, col)]
    pointer, signs, turning = _turning((row, col), x)
    tensors = (x, *memory, x if ids is None else ids, *keys, x if current is None else current, pointer)
    # bf16 numbers are written as 16-bit words.
    dtypes = tuple(torch.int16 if i in _VALUES and t is not x else t.dtype for i, t in enumerate(tensors))
    of_row = shape.col if row is not None and row.square else shape.row
    widths = [width for side, (width, _) in ((row, of_row), (col, shape.col)) if side is not None]
    programs = -(-K // max(widths)) * sum(max(widths) // width for width in widths)
    launch(
        exact_kernel, (programs, -(-M // (rows * shape.steps))), tensors, dtypes,
        (M,), (*_words(row), *_words(col), signs),
        {
            **_constants("ROW", row), **_constants("COL", col),
            "SQUARE_ROW": row is not None and row.square, "SQUARE_COL": col is not None and col.square,
            **turning, "GIVEN_COLS": ids is not None, "GUARDED": current is not None, "GPU": _on_gpu(x),
            "K": K, "x_stride": x.stride(0), "R": rows,
            "ROW_C": of_row[0], "ROW_WIDE": of_row[1], "COL_C": shape.col[0], "COL_WIDE": shape.col[1],
            "STEPS": shape.steps,
        },
        shape.options,
    )  # fmt: skip


def _kind(sides: list[_Side], rows: int) -> str:
    return kind_of(
        rows,
        stochastic=any(side.seed is not None for side in sides),
        transformed=any(side.rotation is not None for side in sides),
        four=any(SPECS[side.format].four_over_six for side in sides),
    )


def _constants(name: str, side: _Side | None) -> dict[str, object]:
    """The kernel's constants of a side: bits of an element, scaling, tile, rounding, whether keys are loaded, and
    whether the amax of a tile may become 4.
    """
    if side is None:
        values: tuple[object, ...] = (0, "", 1, False, False, False)
    else:
        spec = SPECS[side.format]
        bits, tile, loaded = 4 if spec.element is E2M1 else 8, spec.tile or 1, isinstance(side.seed, Tensor)
        values = (bits, spec.scaling.value, tile, side.seed is not None, loaded, spec.four_over_six)
    names = ("", "_SCALING", "_TILE", "_RANDOM", "_LOADED", "_FOUR")
    return dict(zip((name + end for end in names), values, strict=True))


def _rows(side: _Side, row: _Side | None) -> int:
    """Return how many rows a part needs so that it has whole tiles of ``side``."""
    spec = SPECS[side.format]
    if spec.scaling is Scaling.FP32:
        return 128
    return 16 if (side is row and not side.square) or not spec.tile else spec.tile


def _memory(side: _Side | None, amax: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and the bits of the amax; any memory for what is not wanted."""
    if side is None:
        return unused, unused, unused
    scale = side.operand.scale
    return side.operand.values, unused if scale is None else scale, unused if amax is None else amax


def _amaxes(
    x: Tensor, sides: tuple[_Side | None, _Side | None], amax: Tensor | None, current: Tensor | None
) -> list[Tensor | None]:
    """Return for each side the bits of the amax, int32 [1], if its format has a scale for the whole tensor."""
    searched: dict[tuple[int, bool], Tensor] = {}
    found: list[Tensor | None] = []
    for place, side in enumerate(sides):
        if side is None or SPECS[side.format].scaling not in _WHOLE:
            found.append(None)
        elif (given := amax if side.rotation is None else side.rotation.amax) is not None:
            found.append(_bits(given))
        else:
            kind = (SPECS[side.format].tile, side.square)
            if kind not in searched:
                searched[kind] = _searched(x, *kind, sides, current)
            found.append(searched[kind][place * _APART :])
    return found


def _bits(amax: Tensor) -> Tensor:
    return amax.detach().to(torch.float32).reshape(1).view(torch.int32)


def _searched(
    x: Tensor, tile: int, square: bool, sides: tuple[_Side | None, _Side | None], current: Tensor | None
) -> Tensor:
    """Return int32: the bits of the amax over tiles along columns at 0 and along rows at ``_APART``, of the matrix as
    the two sides transform it.
    """
    bits = torch.zeros(2 * _APART, dtype=torch.int32, device=x.device)
    M, K = x.shape
    rows, shape = 16, SHAPES["amax"]
    pointer, signs, turning = _turning(sides, x)
    tensors = (x, bits, bits if current is None else current, pointer)
    launch(
        exact_amax_kernel, (-(-K // shape.col[0]), -(-M // rows)), tensors, tuple(t.dtype for t in tensors),
        (M,), (signs,),
        {
            "TILE": tile, "SQUARE": square, **turning, "GUARDED": current is not None,
            "GPU": _on_gpu(x), "K": K, "x_stride": x.stride(0), "R": rows, "C": shape.col[0], "WIDE": shape.col[1],
        },
        shape.options,
    )  # fmt: skip
    return bits


def _turning(sides: tuple[_Side | None, _Side | None], unused: Tensor) -> tuple[Tensor, int, dict[str, object]]:
    """Return what the kernels need of the transform of the second side: signs as a tensor, any memory if they are not
    on the device, and as a number; and the constants.
    """
    rotation = None if sides[1] is None else sides[1].rotation
    signs = 0 if rotation is None else rotation.signs
    constants: dict[str, object] = {"TURNED": rotation is not None, "SIGNS_LOADED": isinstance(signs, Tensor)}
    return (signs, 0, constants) if isinstance(signs, Tensor) else (unused, signs, constants)


def _words(side: _Side | None) -> list[int]:
    return key_arguments(None if side is None else side.seed)


def _checked(x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise SnipError(f"quantisation takes a 2-D tensor [rows, cols], not shape {tuple(x.shape)}: flatten it first")
    if x.dtype not in _DTYPES:
        raise SnipError(f"quantisation takes fp32, bf16 or fp16, not {x.dtype}")
    x = x.detach()
    return x if x.stride(1) == 1 else x.contiguous()


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and not triton.knobs.runtime.interpret
