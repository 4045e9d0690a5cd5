"""Quantised GEMM operands in plain torch: K-major E4M3 storage with FP32 scales.

The layouts are those of cuBLAS' block-scaled GEMM on Hopper (``torch.nn.functional.scaled_mm``). Every E2M1 number is
exact in E4M3, so fp4 operands have the storage of fp8 operands. ``kernels/quantize.py`` has the same functions in
Triton, with the same bytes; this module is their reference, and runs where the kernels do not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import Quantized, quantize
from snip_megatron.numerics.quantize.row_map import RowMap
from snip_megatron.numerics.quantize.wire import pack_fp4 as pack_fp4
from snip_megatron.numerics.quantize.wire import unpack_fp4 as unpack_fp4
from snip_megatron.precision import Format

STORED = (Format.FP8, Format.FP4)
"""Formats with 1×128 tiles and 128×128 blocks that E4M3 storage with FP32 scales can represent."""


class Operand(NamedTuple):
    """One operand of a GEMM: ``rows`` vectors of length ``depth``, quantised along the reduction dimension.

    Attributes:
        values: float8_e4m3fn [rows, depth padded with zeros to a multiple of 128], row-major.
        scale: FP32. Scaling "tile": [rows, ceil(depth/128)] with strides (1, rows). Scaling "block": [ceil(depth/128)
            padded to a multiple of 4, ceil(rows/128)] with strides (1, first size); entries of the padding are 1.
            Scaling "tensor": [1].
        scaling: "tile" (1×128), "block" (128×128) or "tensor".
        depth: length of the reduction without padding.
    """

    values: Tensor
    scale: Tensor
    scaling: str
    depth: int

    @property
    def rows(self) -> int:
        """Number of vectors: the size of the dimension that is not reduced over."""
        return self.values.shape[0]

    def dequantize(self) -> Tensor:
        """Return the dequantised operand, FP32 [rows, depth]."""
        tiles = self.values.shape[1] // TILE
        if self.scaling == "tensor":
            return self.values[:, : self.depth].to(torch.float32) * self.scale
        if self.scaling == "tile":
            scale, tile = self.scale, (1, TILE)
        else:
            scale, tile = self.scale[:tiles].t(), (TILE, TILE)
        return Quantized(self.values.to(torch.float32), scale, tile).dequantize()[:, : self.depth]


def quantize_operands(
    x: Tensor, spec: OperandSpec, cached: CachedPair | None = None, rows: RowMap | None = None
) -> OperandPair:
    """Quantise a matrix [M, K] for the GEMM that reduces over K and for the one that reduces over M.

    fp8 and fp4 have 1×128 tiles along the reduction, or 128×128 blocks if the matrix is a weight. fp8 always rounds to
    nearest (docs/how-it-works.md, Formats). Raises SnipError if the dtype or the number of dimensions is not supported.
    Operands in formats without E4M3 storage are left out; ``cached`` ones are written to and returned. With ``rows`` x
    has no padding, and its padded rows are quantised.

    Returns:
        The rowwise :class:`Operand` with M rows, and the columnwise one of the transposed matrix with K rows; None for
        what is left out.
    """
    x = x if rows is None else rows.pad(x)
    made = _operand(x, spec, 1), _operand(x, spec, 0)
    return made if cached is None else cached.renew(made)


def _operand(x: Tensor, spec: OperandSpec, axis: int) -> Operand | None:
    fmt = spec.formats[1 - axis]
    if fmt not in STORED and fmt is not Format.FP8_TENSOR:
        return None
    x, options = spec.of(x, axis)
    q, depth = quantize(x, **options), x.shape[axis]
    values, scale = (q.values, q.scale) if axis else (q.values.t(), q.scale.t())
    if fmt is Format.FP8_TENSOR:
        scale = scale.reshape(-1)[:1] if scale.numel() else torch.ones(1, device=x.device)
        return Operand(_stored_values(values), scale, "tensor", depth)
    if fmt is Format.FP4 and "rounding" not in options:
        values.add_(0.0)  # without negative zeros: a sign would cost kernels an instruction, and it changes no product
    rows, tiles = scale.shape
    if not spec.weight:
        found = torch.empty_strided((rows, tiles), (1, rows), dtype=torch.float32, device=scale.device)
        return Operand(_stored_values(values), found.copy_(scale), "tile", depth)
    padded = torch.ones(rows, -(-tiles // 4) * 4, dtype=torch.float32, device=scale.device)
    padded[:, :tiles] = scale
    return Operand(_stored_values(values), padded.t(), "block", depth)


def _stored_values(values: Tensor) -> Tensor:
    rows, depth = values.shape
    stored = torch.zeros(rows, -(-depth // TILE) * TILE, dtype=torch.float8_e4m3fn, device=values.device)
    stored[:, :depth] = values.to(torch.float8_e4m3fn)
    return stored


def quantize_group_blocks(w: Tensor, spec: OperandSpec) -> OperandPair:
    """Quantise weights [experts, N, K] in 128×128 blocks, for grouped GEMMs; N and K are multiples of 128.

    Returns:
        The rowwise operand: values [experts, N, K], scale [experts, N/128, K/128], and the columnwise one: values
        [experts, K, N], scale [experts, K/128, N/128]. All are contiguous.
    """
    rowwise, columnwise = zip(*(quantize_operands(each, spec) for each in w), strict=True)
    return _stacked(rowwise), _stacked(columnwise)


def _stacked(sides: Sequence[Operand | None]) -> Operand | None:
    found = [side for side in sides if side is not None]
    if not found:
        return None
    scales = [side.scale.t()[:, : side.values.shape[1] // TILE] for side in found]
    return Operand(torch.stack([side.values for side in found]), torch.stack(scales), "block", found[0].depth)
