"""Quantised matrices in bf16, for GEMMs on the bf16 tensor cores of any GPU. In plain torch.

An E2M1 number times an E4M3 scale has at most six significant bits, and an E4M3 number times a power of two has four.
bf16 has eight, so that it represents these products exactly. The elements of nvfp4, mxfp4 and mxfp8 are therefore
multiplied by the scales of their tiles here. The scale of the whole tensor in nvfp4 stays a factor of the GEMM's
result. The scales of fp8 and fp4 are arbitrary FP32 numbers, which are stored separately, one for each tile.
``kernels/exact.py`` has the same function in Triton, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import SPECS, STOCHASTIC, Scaling, resolve
from snip_megatron.quantization.hadamard import Rotation, turned
from snip_megatron.quantization.reference import Quantized, quantize
from snip_megatron.quantization.rounding import Key


class ExactOperand(NamedTuple):
    """A quantised matrix [rows, cols], in the orientation of the matrix it was made of.

    Attributes:
        values: bf16 [rows, cols], row-major: elements times the scales of their tiles, or elements alone.
        scale: FP32 factors by which ``values`` must be multiplied: [1] for the whole matrix, or one for each tile,
            [ceil(rows/tile[0]), ceil(cols/tile[1])]. None if ``values`` are the quantised numbers themselves.
        tile: (rows, columns) that share a factor. None if there is one factor or none.
    """

    values: Tensor
    scale: Tensor | None
    tile: tuple[int, int] | None

    def dequantize(self) -> Tensor:
        """Return the quantised numbers, FP32 [rows, cols]."""
        values = self.values.to(torch.float32)
        if self.scale is None:
            return values
        return values * self.scale if self.tile is None else Quantized(values, self.scale, self.tile).dequantize()


ExactPair = tuple[ExactOperand | None, ExactOperand | None]
"""The operand of the GEMM that reduces over a matrix's columns, and that of the GEMM that reduces over its rows."""


@dataclass(frozen=True)
class CachedExactPair:
    """A quantised weight that stays at the same addresses from step to step, for CUDA graphs.

    Attributes:
        operands: the operands that an earlier call returned for the same shape and formats. They are overwritten.
        current: int32 [1] on the device. If it is not zero, ``operands`` are up to date and are not written.
    """

    operands: ExactPair
    current: Tensor


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
    """Quantise ``x`` [M, K] for the GEMM that reduces over K and for the GEMM that reduces over M.

    Args:
        x: fp32, bf16 or fp16 [M, K]. In fp32, values of mxfp8 lose their bits below 2^-133, bf16's smallest number.
        row_format, col_format: a quantised format each, or None to leave that operand out.
        square: whether to use square blocks in formats that have them. It is set for weights. If both formats have
            the same blocks, both operands are one object.
        row_seed, col_seed: keys of stochastic rounding. None, or a format without stochastic rounding, rounds to
            nearest.
        cols: integer [K], global ids of the columns for stochastic rounding; default: 0, 1, …
        amax: max|x| of the unsharded tensor (0-dim), for formats with a scale for the whole tensor.
        rotation: how the second operand is transformed if ``col_format`` has a Hadamard transform; None: without sign
            changes. A transformed operand has whole groups of 16 rows.
        held: operands to write the result to, which are returned. Default: new ones.

    Returns:
        The two operands. They are one object if :func:`shared` says that their numbers are always equal.

    Raises:
        SnipError: the format, the dtype or the number of dimensions is not supported.
    """
    formats = tuple(None if f is None else resolve(f) for f in (row_format, col_format))
    sides = [
        None if f is None else _operand(x, f, axis, square, seed, cols, amax, rotation)
        for f, axis, seed in zip(formats, (1, 0), (row_seed, col_seed), strict=True)
    ]
    made = (sides[0], sides[0] if shared(*formats, square=square) else sides[1])
    if held is None:
        return made
    for old, new in zip(held.operands, made, strict=True):
        if old is not None and new is not None:
            for kept, fresh in ((old.values, new.values), (old.scale, new.scale)):
                if kept is not None and fresh is not None:
                    kept.copy_(torch.where(held.current != 0, kept, fresh))
    return held.operands


def shared(row: Format | None, col: Format | None, *, square: bool) -> bool:
    """Return whether both operands of a matrix are always the same numbers.

    They are if both have one format, whose scales belong to square blocks or to the whole matrix.
    """
    if row is None or row is not col:
        return False
    spec = SPECS[row]
    return spec.scaling is Scaling.FP32_TENSOR or (square and spec.square_blocks)


def _operand(
    x: Tensor,
    fmt: Format,
    axis: int,
    square: bool,
    seed: Key | None,
    cols: Tensor | None,
    amax: Tensor | None,
    rotation: Rotation | None,
) -> ExactOperand:
    rounding: dict[str, Any] = {}
    if seed is not None and fmt in STOCHASTIC:
        rounding = {"rounding": "stochastic", "seed": seed, "cols": cols}
    x, amax = turned(x, fmt, axis, rotation, amax, weight=square)
    q = quantize(x, fmt, axis=axis, block=square, tensor_amax=amax, **rounding)
    spec = SPECS[fmt]
    if spec.scaling is Scaling.FP32:
        return ExactOperand(q.values.bfloat16(), q.scale, q.tile)
    if spec.scaling is Scaling.FP32_TENSOR:
        scale = q.scale.view(-1)[:1] if q.scale.numel() else torch.ones(1, device=x.device)
        return ExactOperand(q.values.bfloat16(), scale, None)
    if spec.scaling is Scaling.E8M0:
        upper = q.dequantize().view(torch.int32) & -0x10000  # all of a number that bf16 has, as kernels store it
        return ExactOperand(upper.view(torch.float32).bfloat16(), None, None)
    if x.numel() == 0:
        return ExactOperand(q.values.bfloat16(), torch.ones(1, device=x.device), None)
    assert q.factors is not None
    tile_scale, tensor_scale = q.factors
    values = Quantized(q.values, tile_scale, q.tile).dequantize()
    return ExactOperand(values.bfloat16(), tensor_scale.view(1), None)
