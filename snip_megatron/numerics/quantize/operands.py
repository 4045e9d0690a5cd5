"""How a matrix is quantised for the two GEMMs that read it, and the reference quantisers of operands, in plain torch.

A linear reads each of its matrices for two GEMMs. The *rowwise* operand is that of the GEMM that reduces over the
columns of the matrix, the *columnwise* operand that of the one that reduces over its rows.

There are two kinds of operands. :class:`Operand` has the layouts of cuBLAS' block-scaled GEMM on Hopper
(``torch.nn.functional.scaled_mm``): K-major E4M3 values and FP32 scales. :class:`ExactOperand` has bf16 values, for
GEMMs on the bf16 tensor cores of any GPU. ``kernels/quantize.py`` and ``kernels/exact.py`` have the quantisers in
Triton, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import SPECS, STOCHASTIC, TILE, Scaling
from snip_megatron.numerics.quantize.reference import Quantized, Rotation, quantize, turned
from snip_megatron.numerics.quantize.rounding import Key
from snip_megatron.precision import Format

OperandPair = tuple[Any, Any]
"""The rowwise and the columnwise operand of a matrix; None for a GEMM that does not run."""


class GradientKeys(NamedTuple):
    """Keys of the stochastic rounding of G. Every backward makes one, and a tuple is made faster than a dataclass.

    The random bits are a function of the key and of the global position of an element. Recomputation and other parallel
    layouts therefore draw the same bits.

    Attributes:
        dgrad, wgrad: keys of the two GEMMs that read G. A key is a 64-bit seed, or key words on the device. None: the
            GEMM does not round stochastically.
        cols: integer [N local], global indices of G's columns. None: 0, 1, …
        first_row: global index of G's first row. It is 0 unless G is a token shard.
        paired: whether neighbouring columns are pairs (2i, 2i + 1), for which kernels are others.
    """

    dgrad: Key | None
    wgrad: Key | None
    cols: Tensor | None = None
    first_row: int = 0
    paired: bool = False


class OperandSpec(NamedTuple):
    """How a matrix is quantised for the two GEMMs that read it.

    Attributes:
        rowwise, columnwise: formats of the two GEMMs; None if a GEMM does not run.
        weight: whether the matrix is a weight, which is quantised in blocks instead of tiles.
        amax: max|·| of the unsharded matrix, 0-dim FP32. It is required if the matrix is a shard and a format has one
            scale for the whole tensor.
        keys: keys of stochastic rounding; None unless the matrix is G.
        rotation: how the columnwise operand is transformed if its format has a Hadamard transform; None: with key 0.
    """

    rowwise: Format | None
    columnwise: Format | None
    weight: bool = False
    amax: Tensor | None = None
    keys: GradientKeys | None = None
    rotation: Rotation | None = None

    @property
    def formats(self) -> tuple[Format | None, Format | None]:
        """The formats of the rowwise and of the columnwise operand."""
        return self.rowwise, self.columnwise

    @property
    def seeds(self) -> tuple[Key | None, Key | None]:
        """The keys of stochastic rounding of the rowwise and of the columnwise operand; None: to nearest."""
        if self.keys is None:
            return None, None
        dgrad, wgrad = (fmt in STOCHASTIC for fmt in self.formats)
        return self.keys.dgrad if dgrad else None, self.keys.wgrad if wgrad else None

    def only(self, formats: Collection[Format]) -> OperandSpec:
        """Return the spec without the operands in other formats than ``formats``."""
        row, col = (fmt if fmt in formats else None for fmt in self.formats)
        return self._replace(rowwise=row, columnwise=col)

    def of(self, x: Tensor, axis: int) -> tuple[Tensor, dict[str, Any]]:
        """Return what is quantised of x [rows, cols] for the GEMM that reduces over ``axis`` (0 or 1), and how."""
        fmt, seed = self.formats[1 - axis], self.seeds[1 - axis]
        assert fmt is not None
        x, amax = turned(x, fmt, axis, self.rotation, self.amax, weight=self.weight)
        options: dict[str, Any] = {"format": fmt, "axis": axis, "block": self.weight, "tensor_amax": amax}
        if seed is not None and self.keys is not None:
            first, cols = self.keys.first_row, self.keys.cols
            options |= {"rounding": "stochastic", "seed": seed, "offset": (first, 0), "cols": cols}
        return x, options


@dataclass(frozen=True)
class CachedPair:
    """The two operands of a weight, which stay at the same addresses from step to step for CUDA graphs.

    Attributes:
        operands: what an earlier call returned for the same weight and formats. They are overwritten.
        current: int32 [1] on the device. If it is not zero, the operands are up to date and are not written.
    """

    operands: OperandPair
    current: Tensor

    def renew(self, made: OperandPair) -> OperandPair:
        """Copy the tensors of ``made`` into those of ``operands``, unless they are up to date, and return these."""
        for old, new in zip(self.operands, made, strict=True):
            if old is not None and new is not None:
                for kept, fresh in ((old.values, new.values), (old.scale, new.scale)):
                    if kept is not None:
                        kept, fresh = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (kept, fresh))
                        kept.copy_(torch.where(self.current != 0, kept, fresh))
        return self.operands


# -- rows of experts -------------------------------------------------------------------------------------------------
class RowMap(NamedTuple):
    """Places of the rows of experts. ``kernels/rows.py`` has its functions in Triton.

    Attributes:
        experts: int32 [padded rows], the expert of every padded row, ascending. Every expert has a multiple of 128.
        table: int32 [4, experts], of every expert its first padded row, its first row without padding, its number of
            rows without padding, and the row after its last padded one.
    """

    experts: Tensor
    table: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """Return x [rows, ...], which has no padding, with zero rows after the rows of each expert."""
        own, rows = self._places()
        padded = x.new_zeros(len(own), *x.shape[1:])
        padded[own] = x[rows]
        return padded

    def unpad(self, padded: Tensor, rows: int) -> Tensor:
        """Return the ``rows`` rows that :meth:`pad` was given, in their order."""
        own, places = self._places()
        x = padded.new_empty(rows, *padded.shape[1:])
        x[places] = padded[own]
        return x

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return which padded rows are no padding, and which rows they are."""
        start, first, count, _ = self.table[:, self.experts.long()]
        place = torch.arange(len(start), device=start.device) - start
        own = place < count
        return own, (first + place)[own]


# -- E4M3 operands ---------------------------------------------------------------------------------------------------
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


# -- bf16 operands ---------------------------------------------------------------------------------------------------
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
        None if fmt is None else _exact_operand(*spec.of(x, axis))
        for fmt, axis in zip(spec.formats, (1, 0), strict=True)
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


def _exact_operand(x: Tensor, options: dict[str, Any]) -> ExactOperand:
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
