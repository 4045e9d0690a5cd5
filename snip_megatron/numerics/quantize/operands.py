"""How a matrix is quantised for the two GEMMs that read it, and the reference quantisers of operands in plain torch.

The *rowwise* operand is that of the GEMM that reduces over the columns of the matrix, the *columnwise* operand that of
the GEMM that reduces over its rows. :class:`Operand` has the layouts of cuBLAS' block-scaled GEMM on Hopper: K-major
E4M3 values and FP32 scales. :class:`ExactOperand` has bf16 values, for the bf16 tensor cores of any GPU.
``kernels/quantize.py`` and ``kernels/exact.py`` have the quantisers in Triton, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import SPECS, STOCHASTIC, TILE, Scaling
from snip_megatron.numerics.quantize.reference import Quantized, Rotation, quantize, rotate_operand
from snip_megatron.numerics.quantize.rounding import Key
from snip_megatron.precision import Format, FormatPair

OperandPair = tuple[Any, Any]
"""The rowwise and the columnwise operand of a matrix. An operand is None if its GEMM does not run."""


class GradientKeys(NamedTuple):
    """Keys of the stochastic rounding of G. A named tuple, because every backward makes one."""

    # dgrad, wgrad: keys of the two GEMMs that read G. None if the GEMM does not round stochastically
    dgrad: Key | None
    wgrad: Key | None
    cols: Tensor | None = None  # integer [N local], global indices of G's columns. None: 0, 1, …
    first_row: int = 0  # global index of G's first row. It is 0 unless G is a token shard
    paired: bool = False  # whether neighbouring columns are pairs (2i, 2i + 1), for which kernels compute one hash


class OperandSpec(NamedTuple):
    """How a matrix is quantised for the two GEMMs that read it."""

    # rowwise, columnwise: formats of the two GEMMs. A format is None if its GEMM does not run
    rowwise: Format | None
    columnwise: Format | None
    weight: bool = False  # whether the matrix is a weight, which is quantised in blocks instead of tiles
    # max|·| of the unsharded matrix, 0-dim FP32. Required of a shard if a format has one scale for the tensor
    amax: Tensor | None = None
    keys: GradientKeys | None = None  # keys of stochastic rounding. None unless the matrix is G
    # how a Hadamard transform changes the columnwise operand. None: without sign changes
    rotation: Rotation | None = None

    @property
    def formats(self) -> FormatPair:
        return self.rowwise, self.columnwise

    @property
    def seeds(self) -> tuple[Key | None, Key | None]:
        """The keys of the rowwise and of the columnwise operand. A key is None if its operand is rounded to nearest."""
        if self.keys is None:
            return None, None
        dgrad, wgrad = (fmt in STOCHASTIC for fmt in self.formats)
        return self.keys.dgrad if dgrad else None, self.keys.wgrad if wgrad else None

    def only(self, formats: Collection[Format]) -> OperandSpec:
        """Return the spec without the operands in other formats than ``formats``."""
        row, col = (fmt if fmt in formats else None for fmt in self.formats)
        return self._replace(rowwise=row, columnwise=col)

    def quantizer_arguments(self, x: Tensor, axis: int) -> tuple[Tensor, dict[str, Any]]:
        """Return the arguments of :func:`.reference.quantize` for the GEMM that reduces x over ``axis`` (0 or 1): x,
        transformed if the format has a Hadamard transform, and the named arguments.
        """
        fmt, seed = self.formats[1 - axis], self.seeds[1 - axis]
        assert fmt is not None
        x, amax = rotate_operand(x, fmt, axis, self.rotation, self.amax, weight=self.weight)
        options: dict[str, Any] = {"format": fmt, "axis": axis, "block": self.weight, "tensor_amax": amax}
        if seed is not None and self.keys is not None:
            first, cols = self.keys.first_row, self.keys.cols
            options |= {"rounding": "stochastic", "seed": seed, "offset": (first, 0), "cols": cols}
        return x, options


@dataclass(frozen=True)
class CachedPair:
    """The two operands of a weight, which stay at the same addresses from step to step for CUDA graphs."""

    operands: OperandPair  # the result of an earlier call for the same weight and formats. It is overwritten
    current: Tensor  # int32 [1] on the device. If it is not zero, the operands are up to date and are not written

    def update(self, pair: OperandPair) -> OperandPair:
        """Copy ``pair`` into ``operands``, unless these are up to date, and return ``operands``."""
        for old, new in zip(self.operands, pair, strict=True):
            if old is not None and new is not None:
                for target, source in ((old.values, new.values), (old.scale, new.scale)):
                    if target is not None:
                        target, source = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (target, source))
                        target.copy_(torch.where(self.current != 0, target, source))
        return self.operands


class RowMap(NamedTuple):
    """Where the rows of experts lie in a matrix that pads those of each expert with zeros, and in one without padding.

    ``kernels/quantize.py`` has the functions in Triton.
    """

    # int32 [padded rows], the expert of every padded row, ascending. Every expert has a multiple of 128. The last rows
    # may be of no expert, -1
    experts: Tensor
    # int32 [4, experts], of every expert its first padded row, its first row without padding, its number of rows
    # without padding, and the row after its last padded one
    table: Tensor

    @classmethod
    def of_counts(cls, counts: Tensor, rows: int, *, backwards: bool) -> RowMap:
        """Return where ``rows`` padded rows are of experts that have ``counts``, integers [experts], without padding.

        ``backwards`` says whether the last expert comes first.
        """
        firsts = counts.cumsum(0) - counts
        if backwards:
            counts, firsts = counts.flip(0), firsts.flip(0)
        padded = (counts + TILE - 1) // TILE * TILE
        bounds = padded.cumsum(0)
        table = torch.stack((bounds - padded, firsts, counts, bounds)).int()
        experts = torch.searchsorted(bounds, torch.arange(rows, device=bounds.device), right=True).int()
        return cls(experts.masked_fill(experts == len(counts), -1), table)

    def pad(self, x: Tensor) -> Tensor:
        """Return x [rows, ...], which has no padding, with zero rows after the rows of each expert."""
        valid, rows = self._rows()
        padded = x.new_zeros(len(valid), *x.shape[1:])
        padded[valid] = x[rows]
        return padded

    def unpad(self, padded: Tensor, count: int) -> Tensor:
        """Undo :meth:`pad` of a matrix of ``count`` rows."""
        valid, rows = self._rows()
        x = padded.new_empty(count, *padded.shape[1:])
        x[rows] = padded[valid]
        return x

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return which padded rows are no padding, and the rows without padding that they hold."""
        start, first, count, _ = self.table[:, self.experts.long()]
        place = torch.arange(len(start), device=start.device) - start
        valid = (place < count) & (self.experts >= 0)
        return valid, (first + place)[valid]


# -- E4M3 operands ---------------------------------------------------------------------------------------------------
TILED = (Format.FP8, Format.FP4)
"""Formats with 1×128 tiles and 128×128 blocks. Every E2M1 number is exact in E4M3, so that both are stored in E4M3."""


class Operand(NamedTuple):
    """One operand of a GEMM: ``rows`` vectors of length ``depth``, quantised along the reduction dimension."""

    values: Tensor  # float8_e4m3fn [rows, depth padded with zeros to a multiple of 128], row-major
    # FP32. Scaling "tile": [rows, ceil(depth/128)] with strides (1, rows). Scaling "block": [ceil(depth/128) padded to
    # a multiple of 4, ceil(rows/128)] with strides (1, first size); entries of the padding are 1. Scaling "tensor": [1]
    scale: Tensor
    scaling: str  # "tile" (1×128), "block" (128×128) or "tensor"
    depth: int  # length of the reduction without padding

    @property
    def rows(self) -> int:
        """Number of vectors: the size of the dimension that is not reduced over."""
        return self.values.shape[0]

    def dequantize(self) -> Tensor:
        """Return the dequantised operand, FP32 [rows, depth]."""
        if self.scaling == "tensor":
            return self.values[:, : self.depth].to(torch.float32) * self.scale
        if self.scaling == "tile":
            scale, tile = self.scale, (1, TILE)
        else:
            scale, tile = self.scale[: self.values.shape[1] // TILE].t(), (TILE, TILE)
        return Quantized(self.values.to(torch.float32), scale, tile).dequantize()[:, : self.depth]


def quantize_operands(
    x: Tensor, spec: OperandSpec, cached: CachedPair | None = None, rows: RowMap | None = None
) -> OperandPair:
    """Quantise a matrix [M, K] for the GEMM that reduces over K and for the one that reduces over M.

    fp8 always rounds to nearest. Raises SnipError if the dtype or the number of dimensions is not supported.

    Args:
        x: fp32, bf16 or fp16 [M, K].
        spec: how it is quantised.
        cached: operands to write the result to, which are returned. Default: new ones.
        rows: the rows of experts. x then has no padding, and its padded rows are quantised.

    Returns:
        The rowwise :class:`Operand` with M rows, and the columnwise one of the transposed matrix with K rows. An
        operand is None if its format has no E4M3 storage.
    """
    x = x if rows is None else rows.pad(x)
    pair = _operand(x, spec, 1), _operand(x, spec, 0)
    return pair if cached is None else cached.update(pair)


def _operand(x: Tensor, spec: OperandSpec, axis: int) -> Operand | None:
    fmt = spec.formats[1 - axis]
    if fmt not in TILED and fmt is not Format.FP8_TENSOR:
        return None
    x, options = spec.quantizer_arguments(x, axis)
    q, depth = quantize(x, **options), x.shape[axis]
    values, scale = (q.values, q.scale) if axis else (q.values.t(), q.scale.t())
    stored = torch.zeros(len(values), -(-depth // TILE) * TILE, dtype=torch.float8_e4m3fn, device=x.device)
    if fmt is Format.FP4 and "rounding" not in options:
        values.add_(0.0)  # without negative zeros: a sign would cost kernels an instruction, and it changes no product
    stored[:, :depth] = values.to(torch.float8_e4m3fn)
    if fmt is Format.FP8_TENSOR:
        return Operand(stored, _tensor_scale(q), "tensor", depth)
    rows, tiles = scale.shape
    if not spec.weight:
        column_major = torch.empty_strided((rows, tiles), (1, rows), dtype=torch.float32, device=scale.device)
        return Operand(stored, column_major.copy_(scale), "tile", depth)
    padded = torch.ones(rows, -(-tiles // 4) * 4, dtype=torch.float32, device=scale.device)
    padded[:, :tiles] = scale
    return Operand(stored, padded.t(), "block", depth)


def _tensor_scale(q: Quantized) -> Tensor:
    """Return the scale [1] of a matrix with one scale. It is 1 if the matrix is empty."""
    return q.scale.reshape(-1)[:1] if q.scale.numel() else torch.ones(1, device=q.scale.device)


def quantize_group_blocks(w: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
    """Quantise weights [experts, N, K] in 128×128 blocks, for grouped GEMMs. N and K are multiples of 128.

    The result is written to ``cached`` if that is given, and is not newly made.

    Returns:
        The rowwise operand: values [experts, N, K], scale [experts, N/128, K/128], and the columnwise one: values
        [experts, K, N], scale [experts, K/128, N/128]. All are contiguous.
    """
    rowwise, columnwise = zip(*(quantize_operands(expert, spec) for expert in w), strict=True)
    pair = _stack(rowwise), _stack(columnwise)
    return pair if cached is None else cached.update(pair)


def _stack(operands: Sequence[Operand | None]) -> Operand | None:
    present = [each for each in operands if each is not None]
    if not present:
        return None
    scales = [each.scale.t()[:, : each.values.shape[1] // TILE] for each in present]
    return Operand(torch.stack([each.values for each in present]), torch.stack(scales), "block", present[0].depth)


# -- bf16 operands -----------------------------------------------------------------------------------------------------
class ExactOperand(NamedTuple):
    """A quantised matrix [rows, cols] in bf16, in the orientation of the matrix that was quantised.

    An E2M1 number times an E4M3 scale has at most six significant bits, an E4M3 number times a power of two four, and
    bf16 has eight. The elements of nvfp4, mxfp4 and mxfp8 are therefore multiplied by the scales of their tiles. The
    scale of the tensor in nvfp4 is a factor of the GEMM's result. The scales of fp8 and fp4 are stored separately.
    """

    values: Tensor  # bf16 [rows, cols], row-major: elements times the scales of their tiles, or elements alone
    # FP32 factors by which ``values`` must be multiplied: [1] for the whole matrix, or one for each tile,
    # [ceil(rows/tile[0]), ceil(cols/tile[1])]. None if ``values`` are the quantised numbers themselves
    scale: Tensor | None
    tile: tuple[int, int] | None  # (rows, columns) that share a factor. None if there is one factor or none

    def dequantize(self) -> Tensor:
        """Return the quantised numbers, FP32 [rows, cols]."""
        values = self.values.to(torch.float32)
        if self.scale is None:
            return values
        return values * self.scale if self.tile is None else Quantized(values, self.scale, self.tile).dequantize()


def quantize_exact(x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
    """Quantise ``x`` [M, K] for the GEMM that reduces over K and for the GEMM that reduces over M.

    Arguments and errors are those of :func:`quantize_operands`. A Hadamard transform pads the columnwise operand with
    zeros to whole groups of 16 rows. Of fp32, values of mxfp8 lose their bits below 2^-133, bf16's smallest number. The
    two operands are one object if :func:`operands_are_equal`.
    """
    row, col = (
        None if fmt is None else _exact_operand(*spec.quantizer_arguments(x, axis))
        for fmt, axis in zip(spec.formats, (1, 0), strict=True)
    )
    pair = row, row if operands_are_equal(spec) else col
    return pair if cached is None else cached.update(pair)


def operands_are_equal(spec: OperandSpec) -> bool:
    """Return whether both operands are in one format whose scales belong to square blocks or to the whole matrix."""
    if spec.rowwise is None or spec.rowwise is not spec.columnwise:
        return False
    of_format = SPECS[spec.rowwise]
    return of_format.scaling is Scaling.FP32_TENSOR or (spec.weight and of_format.square_blocks)


def _exact_operand(x: Tensor, options: dict[str, Any]) -> ExactOperand:
    q, scaling = quantize(x, **options), SPECS[options["format"]].scaling
    if scaling is Scaling.FP32:
        return ExactOperand(q.values.bfloat16(), q.scale, q.tile)
    if scaling is Scaling.FP32_TENSOR:
        return ExactOperand(q.values.bfloat16(), _tensor_scale(q), None)
    if scaling is Scaling.E8M0:
        upper = q.dequantize().view(torch.int32) & -0x10000  # all of a number that bf16 has, as kernels store it
        return ExactOperand(upper.view(torch.float32).bfloat16(), None, None)
    if x.numel() == 0:
        return ExactOperand(q.values.bfloat16(), torch.ones(1, device=x.device), None)
    assert q.factors is not None
    tile_scale, tensor_scale = q.factors
    return ExactOperand(Quantized(q.values, tile_scale, q.tile).dequantize().bfloat16(), tensor_scale.view(1), None)
