"""Quantised matrices in bf16, for GEMMs on the bf16 tensor cores of any GPU. In plain torch.

An E2M1 number times an E4M3 scale has at most six significant bits, and an E4M3 number times a power of two has four.
bf16 has eight, so that it represents these products exactly. The elements of nvfp4, mxfp4 and mxfp8 are therefore
multiplied by the scales of their tiles here. The scale of the whole tensor in nvfp4 stays a factor of the GEMM's
result. The scales of fp8 and fp4 are arbitrary FP32 numbers, which are stored separately, one for each tile.
``kernels/exact.py`` has the same function in Triton, with the same bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import SPECS, Scaling
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import Quantized, quantize


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


def quantize_exact(x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
    """Quantise ``x`` [M, K] for the GEMM that reduces over K and for the GEMM that reduces over M.

    Raises SnipError if the dtype or the number of dimensions is not supported.

    Args:
        x: fp32, bf16 or fp16 [M, K]. In fp32, values of mxfp8 lose their bits below 2^-133, bf16's smallest number.
        spec: how it is quantised, in quantised formats. An operand of a Hadamard transform has whole groups of 16 rows.
        cached: operands to write the result to, which are returned. Default: new ones.

    Returns:
        The two operands. They are one object if :func:`shared` says that their numbers are always equal.
    """
    row, col = (
        None if fmt is None else _operand(*spec.of(x, axis)) for fmt, axis in zip(spec.formats, (1, 0), strict=True)
    )
    made = row, row if shared(spec) else col
    return made if cached is None else cached.renew(made)


def shared(spec: OperandSpec) -> bool:
    """Return whether both operands of a matrix are always the same numbers.

    They are if both have one format, whose scales belong to square blocks or to the whole matrix.
    """
    if spec.rowwise is None or spec.rowwise is not spec.columnwise:
        return False
    of_format = SPECS[spec.rowwise]
    return of_format.scaling is Scaling.FP32_TENSOR or (spec.weight and of_format.square_blocks)


def _operand(x: Tensor, options: dict[str, Any]) -> ExactOperand:
    q, scaling = quantize(x, **options), SPECS[options["format"]].scaling
    if scaling is Scaling.FP32:
        return ExactOperand(q.values.bfloat16(), q.scale, q.tile)
    if scaling is Scaling.FP32_TENSOR:
        scale = q.scale.view(-1)[:1] if q.scale.numel() else torch.ones(1, device=x.device)
        return ExactOperand(q.values.bfloat16(), scale, None)
    if scaling is Scaling.E8M0:
        upper = q.dequantize().view(torch.int32) & -0x10000  # all of a number that bf16 has, as kernels store it
        return ExactOperand(upper.view(torch.float32).bfloat16(), None, None)
    if x.numel() == 0:
        return ExactOperand(q.values.bfloat16(), torch.ones(1, device=x.device), None)
    assert q.factors is not None
    tile_scale, tensor_scale = q.factors
    values = Quantized(q.values, tile_scale, q.tile).dequantize()
    return ExactOperand(values.bfloat16(), tensor_scale.view(1), None)
