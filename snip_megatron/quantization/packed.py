"""Quantised operands as GEMM kernels take them: K-major E4M3 storage and FP32 scales, built in plain torch.

The Triton kernels compute the same under the same names. An E2M1 number is exact in E4M3, so fp4 has fp8's storage.
Layouts are those of cuBLAS' block-scaled GEMM on Hopper (``torch.nn.functional.scaled_mm``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.quantization.formats import FOUR_BIT, TILE, resolve
from snip_megatron.quantization.reference import Quantized, fake_quantize, quantize

STORED = (Format.FP8, Format.FP4)
"""Formats of 1×128 tiles and 128×128 blocks that E4M3 storage with FP32 scales can hold."""


@dataclass(frozen=True)
class Operand:
    """One side of a GEMM: ``rows`` vectors of length ``depth`` (the reduction), quantised along the reduction.

    Attributes:
        values: float8_e4m3fn [rows, depth padded with zeros to a multiple of 128], row-major.
        scale: FP32. Tiles: [rows, ceil(depth/128)], strides (1, rows). Blocks: [ceil(depth/128) padded to a multiple
            of 4, ceil(rows/128)], strides (1, first size); entries of the padding are 1. Tensor: [1].
        scaling: "tile" (1×128), "block" (128×128) or "tensor".
        depth: length of the reduction without padding.
    """

    values: Tensor
    scale: Tensor
    scaling: str
    depth: int

    @property
    def rows(self) -> int:
        """Vectors that are not reduced over."""
        return self.values.shape[0]

    def dequantize(self) -> Tensor:
        """FP32 [rows, depth]."""
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
    """What one read of a matrix [M, K] gives.

    Attributes:
        row: reduction along K: rows = M, depth = K. None when not asked for.
        col: reduction along M, transposed storage: rows = K, depth = M. None when not asked for.
        sums: float64 [1 + 2·candidates, K], column sums of x², then for each candidate format of (Q(x) − x)² with
            tiles along K and of (Q(x) − x)² with tiles along M. None when not asked for.
    """

    row: Operand | None
    col: Operand | None
    sums: Tensor | None = None


def quantize_tiles(
    x: Tensor,
    row_format: Format | str | None,
    col_format: Format | str | None,
    *,
    row_seed: int | None = None,
    col_seed: int | None = None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    candidates: Sequence[Format | str] = (),
) -> Operands:
    """1×128 tiles of ``x`` [M, K] along K and along M, each in its own format, and errors of candidate formats.

    Args:
        x: fp32, bf16 or fp16 [M, K].
        row_format, col_format: fp8, fp4 or None (not wanted).
        row_seed, col_seed: round fp4 stochastically with this key, in tiles along K and along M; None: nearest.
            fp8 rounds to nearest whatever the seed (METHOD, Formats).
        offset, rows, cols: global position of x's elements, as in ``fake_quantize``.
        candidates: formats (fp8, fp4) whose errors are summed; they round as the outputs would.

    Raises:
        SnipError: another format, dtype or number of dimensions.
    """
    where: dict[str, Any] = {"offset": offset, "rows": rows, "cols": cols}
    row = col = None
    if row_format is not None:
        rounding = _rounding(_stored(row_format), row_seed)
        row = _tile_operand(_quantized(x, row_format, **rounding, **where), x.shape[1])
    if col_format is not None:
        rounding = _rounding(_stored(col_format), col_seed)
        q = _quantized(x, col_format, axis=0, **rounding, **where)
        col = _tile_operand(Quantized(q.values.t(), q.scale.t(), (1, TILE)), x.shape[0])
    return Operands(row, col, _error_sums(x, candidates, row_seed, col_seed, where) if candidates else None)


def quantize_blocks(w: Tensor, row_format: Format | str | None, col_format: Format | str | None) -> Operands:
    """128×128 blocks of a weight [N, K]: ``row`` for fprop (reduction K), ``col`` for dgrad (reduction N)."""
    row = col = None
    if row_format is not None:
        _stored(row_format)
        row = _block_operand(_quantized(w, row_format, block=True), w.shape[1])
    if col_format is not None:
        _stored(col_format)
        q = _quantized(w, col_format, block=True)
        col = _block_operand(Quantized(q.values.t(), q.scale.t(), q.tile), w.shape[0])
    return Operands(row, col)


def quantize_tensor(x: Tensor, *, row: bool = True, col: bool = False, amax: Tensor | None = None) -> Operands:
    """fp8_tensor: one scale, ``amax``/448 (0-dim FP32; default max|x|), in either orientation or both."""
    q = quantize(x, Format.FP8_TENSOR, tensor_amax=amax)
    scale = q.scale.view(-1)[:1] if q.scale.numel() else torch.ones(1, device=x.device)
    return Operands(
        Operand(_stored_values(q.values), scale, "tensor", x.shape[1]) if row else None,
        Operand(_stored_values(q.values.t()), scale, "tensor", x.shape[0]) if col else None,
    )


def stored_format(format: Format | str) -> Format:
    """The format if tiles of it fit E4M3 storage with FP32 scales. Raises SnipError."""
    return _stored(format)


def _stored(format: Format | str) -> Format:
    known = resolve(format)
    if known not in STORED:
        raise SnipError(f"format {known.value!r} has no E4M3 tiles with FP32 scales (fp8 and fp4 do)")
    return known


def _rounding(format: Format, seed: int | None) -> dict[str, Any]:
    return {} if seed is None or format not in FOUR_BIT else {"rounding": "stochastic", "seed": seed}


def _quantized(x: Tensor, format: Format | str, **options: Any) -> Quantized:
    """As ``quantize``, but fp4 rounded to nearest has no negative zero: its sign would cost the kernels an instruction
    an element and changes no product."""
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
    padded = -(-depth_blocks // 4) * 4
    scale = torch.ones(row_blocks, padded, dtype=torch.float32, device=q.scale.device)
    scale[:, :depth_blocks] = q.scale
    return Operand(_stored_values(q.values), scale.t(), "block", depth)


def _error_sums(
    x: Tensor, candidates: Sequence[Format | str], row_seed: int | None, col_seed: int | None, where: dict[str, Any]
) -> Tensor:
    exact = x.detach().to(torch.float64)
    sums = [exact.square().sum(0)]
    for candidate in candidates:
        format = _stored(candidate)
        for axis, seed in ((-1, row_seed), (0, col_seed)):
            found = fake_quantize(x, format, axis=axis, **_rounding(format, seed), **where)
            sums.append((found.to(torch.float64) - exact).square().sum(0))
    return torch.stack(sums)
