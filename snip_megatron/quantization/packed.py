"""Quantised GEMM operands in plain torch: K-major E4M3 storage with FP32 scales.

The layouts are those of cuBLAS' block-scaled GEMM on Hopper (``torch.nn.functional.scaled_mm``). Every E2M1 number is
exact in E4M3, so fp4 operands have the storage of fp8 operands. ``kernels/quantize.py`` has the same functions in
Triton, with the same bytes; this module is their reference, and runs where the kernels do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.precision import FOUR_BIT, Format
from snip_megatron.quantization.formats import TILE, resolve
from snip_megatron.quantization.reference import Quantized, quantize
from snip_megatron.quantization.rounding import Key
from snip_megatron.quantization.wire import pack_fp4 as pack_fp4
from snip_megatron.quantization.wire import unpack_fp4 as unpack_fp4

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
        unpadded: a contiguous copy [ceil(rows/128), ceil(depth/128)] of a block operand's scales without the padding,
            for a library that cannot read the padded ones. None if nothing needs a copy.
    """

    values: Tensor
    scale: Tensor
    scaling: str
    depth: int
    unpadded: Tensor | None = None

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


@dataclass(frozen=True)
class Operands:
    """The operands that are made of a matrix [M, K] in one read.

    Attributes:
        row: the matrix with reduction along K: rows = M, depth = K. None if it was not requested.
        col: the transposed matrix with reduction along M: rows = K, depth = M. None if it was not requested.
    """

    row: Operand | None
    col: Operand | None


@dataclass(frozen=True)
class CachedOperands:
    """A quantised weight that stays at the same addresses from step to step, for CUDA graphs.

    Attributes:
        operands: the operands that an earlier call returned for the same shape and formats. They are overwritten.
        current: int32 [1] on the device. If it is not zero, ``operands`` are up to date and are not written.
    """

    operands: Operands
    current: Tensor


def quantize_tiles(
    x: Tensor,
    row_format: Format | str | None,
    col_format: Format | str | None,
    *,
    row_seed: Key | None = None,
    col_seed: Key | None = None,
    first_row: int = 0,
    cols: Tensor | None = None,
) -> Operands:
    """Quantise ``x`` [M, K] in 1×128 tiles along K and in 1×128 tiles along M. Each operand has its own format.

    Args:
        x: fp32, bf16 or fp16 [M, K].
        row_format, col_format: fp8, fp4, or None to leave that operand out.
        row_seed, col_seed: seeds of stochastic rounding to fp4, for the tiles along K and along M. None rounds to
            nearest. fp8 always rounds to nearest (docs/how-it-works.md, Formats).
        first_row: global id of the first row, for the draws.
        cols: integer [K], global ids of the columns, likewise; default: 0, 1, …

    Raises:
        SnipError: the format, the dtype or the number of dimensions is not supported.
    """
    where: dict[str, Any] = {"offset": (first_row, 0), "cols": cols}
    row = col = None
    if row_format is not None:
        rounding = _rounding(stored_format(row_format), row_seed)
        row = _tile_operand(_quantized(x, row_format, **rounding, **where), x.shape[1])
    if col_format is not None:
        rounding = _rounding(stored_format(col_format), col_seed)
        q = _quantized(x, col_format, axis=0, **rounding, **where)
        col = _tile_operand(Quantized(q.values.t(), q.scale.t(), (1, TILE)), x.shape[0])
    return Operands(row, col)


def quantize_blocks(
    w: Tensor, row_format: Format | str | None, col_format: Format | str | None, *, held: CachedOperands | None = None
) -> Operands:
    """Quantise a weight [N, K] in 128×128 blocks.

    Args:
        w: fp32, bf16 or fp16 [N, K].
        row_format: format of ``row``, the operand of fprop (reduction along K); None to leave it out.
        col_format: format of ``col``, the operand of dgrad (reduction along N); None to leave it out.
        held: operands to write the result to, which are returned. Default: new ones.

    Raises:
        SnipError: the format, the dtype or the number of dimensions is not supported.
    """
    row = col = None
    if row_format is not None:
        stored_format(row_format)
        row = _block_operand(_quantized(w, row_format, block=True), w.shape[1])
    if col_format is not None:
        stored_format(col_format)
        q = _quantized(w, col_format, block=True)
        col = _block_operand(Quantized(q.values.t(), q.scale.t(), q.tile), w.shape[0])
    return _kept(Operands(row, col), held)


def quantize_tensor(
    x: Tensor, *, row: bool = True, col: bool = False, amax: Tensor | None = None, held: CachedOperands | None = None
) -> Operands:
    """Quantise ``x`` [M, K] to fp8_tensor: E4M3 with one scale, ``amax``/448.

    Args:
        x: fp32, bf16 or fp16 [M, K].
        row, col: which operands to return.
        amax: max|x| of the whole tensor, 0-dim FP32. Default: that of ``x``.
        held: operands to write the result to, which are returned. Default: new ones.
    """
    q = quantize(x, Format.FP8_TENSOR, tensor_amax=amax)
    scale = q.scale.view(-1)[:1] if q.scale.numel() else torch.ones(1, device=x.device)
    made = Operands(
        Operand(_stored_values(q.values), scale, "tensor", x.shape[1]) if row else None,
        Operand(_stored_values(q.values.t()), scale, "tensor", x.shape[0]) if col else None,
    )
    return _kept(made, held)


def _kept(made: Operands, held: CachedOperands | None) -> Operands:
    """Copy ``made`` into the operands of ``held``, unless they are up to date, and return these."""
    if held is None:
        return made
    for old, new in ((held.operands.row, made.row), (held.operands.col, made.col)):
        if old is not None and new is not None:
            for kept, tensor in ((old.values.view(torch.uint8), new.values.view(torch.uint8)), (old.scale, new.scale)):
                kept.copy_(torch.where(held.current != 0, kept, tensor))
    return held.operands


def stored_format(format: Format | str) -> Format:
    """Return the format if tiles of it fit E4M3 storage with FP32 scales. Raises SnipError otherwise."""
    known = resolve(format)
    if known not in STORED:
        raise SnipError(f"format {known.value!r} has no E4M3 tiles with FP32 scales (fp8 and fp4 do)")
    return known


def _rounding(format: Format, seed: Key | None) -> dict[str, Any]:
    return {} if seed is None or format not in FOUR_BIT else {"rounding": "stochastic", "seed": seed}


def _quantized(x: Tensor, format: Format | str, **options: Any) -> Quantized:
    """Quantise as ``quantize`` does, but without negative zeros where fp4 rounds to nearest.

    The sign of a zero would cost the kernels an instruction per element, and it changes no product.
    """
    q = quantize(x, format, **options)
    if resolve(format) in FOUR_BIT and "rounding" not in options:
        q.values.add_(0.0)
    return q


def _stored_values(values: Tensor) -> Tensor:
    rows, depth = values.shape
    stored = torch.zeros(rows, -(-depth // TILE) * TILE, dtype=torch.float8_e4m3fn, device=values.device)
    stored[:, :depth] = values.to(torch.float8_e4m3fn)
    return stored


def _tile_operand(q: Quantized, depth: int) -> Operand:
    rows, tiles = q.scale.shape
    scale = torch.empty_strided((rows, tiles), (1, rows), dtype=torch.float32, device=q.scale.device)
    return Operand(_stored_values(q.values), scale.copy_(q.scale), "tile", depth)


def _block_operand(q: Quantized, depth: int) -> Operand:
    row_blocks, depth_blocks = q.scale.shape
    padded = torch.ones(row_blocks, -(-depth_blocks // 4) * 4, dtype=torch.float32, device=q.scale.device)
    padded[:, :depth_blocks] = q.scale
    return Operand(_stored_values(q.values), padded.t(), "block", depth)
