"""The GEMMs of a linear on Hopper's FP8 tensor cores, with quantisation by one Triton kernel a tensor.

fp8 and fp4: 1×128 tiles by 128×128 blocks in fprop and dgrad, 1×128 by 1×128 in wgrad, FP32 scales. An E2M1 number is
exact in E4M3, so fp4 runs with fp4's numerics at fp8's speed. ``fp8_tensor``: one scale a tensor. bf16 GEMMs of mixed
linears are plain library GEMMs; the other formats fall to the reference, GEMM by GEMM. See README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from snip_megatron.gemm import reference
from snip_megatron.gemm.backend import Sides
from snip_megatron.gemm.operands import GradientKeys, Plain, Side
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format
from snip_megatron.quantization.packed import STORED, Operand, Operands

_NOTHING = Operands(None, None)


class Quantizers(Protocol):
    """The functions of ``quantization.packed`` and, as kernels, ``quantization.triton_quantize``."""

    quantize_tiles: Callable[..., Operands]
    quantize_blocks: Callable[..., Operands]
    quantize_tensor: Callable[..., Operands]


class HopperBackend:
    """See the module.

    Args:
        quantizers: what quantises.
        products: what multiplies.
    """

    name = "hopper"

    def __init__(self, quantizers: Quantizers, products: ScaledProducts) -> None:
        self._quantizers = quantizers
        self._products = products

    # -- quantisation --------------------------------------------------------------------------------------------
    def quantize_input(
        self, x: Tensor, fprop: Format | None, wgrad: Format | None, *, amax: Tensor | None = None
    ) -> Sides:
        """See :class:`snip_megatron.gemm.backend.GemmBackend`."""
        return self._quantize(x, (fprop, wgrad), self._quantizers.quantize_tiles, amax)

    def quantize_weight(
        self, w: Tensor, fprop: Format | None, dgrad: Format | None, *, amax: Tensor | None = None
    ) -> Sides:
        """See :class:`snip_megatron.gemm.backend.GemmBackend`."""
        return self._quantize(w, (fprop, dgrad), self._quantizers.quantize_blocks, amax)

    def quantize_gradient(
        self,
        g: Tensor,
        dgrad: Format | None,
        wgrad: Format | None,
        keys: GradientKeys,
        *,
        amax: Tensor | None = None,
    ) -> Sides:
        """See :class:`snip_megatron.gemm.backend.GemmBackend`."""
        tiles = partial(self._quantizers.quantize_tiles, row_seed=keys.dgrad, col_seed=keys.wgrad, cols=keys.cols)
        return self._quantize(g, (dgrad, wgrad), tiles, amax, (keys.dgrad, keys.wgrad), keys.cols)

    def _quantize(
        self,
        x: Tensor,
        formats: tuple[Format | None, Format | None],
        tiles: Callable[..., Operands],
        amax: Tensor | None,
        seeds: tuple[int | None, int | None] = (None, None),
        cols: Tensor | None = None,
    ) -> Sides:
        """Both orientations in one read where both have tiles (or blocks), or both one scale a tensor."""
        stored = [fmt if fmt in STORED else None for fmt in formats]
        scaled = [fmt is Format.FP8_TENSOR for fmt in formats]
        tiled = tiles(x, *stored) if any(stored) else _NOTHING
        whole = _NOTHING
        if any(scaled):
            whole = self._quantizers.quantize_tensor(x, row=scaled[0], col=scaled[1], amax=amax)

        def plain(side: int) -> Plain | None:
            fmt = formats[side]
            return None if fmt is None else Plain(x, fmt, seeds[side], cols, amax)

        return tiled.row or whole.row or plain(0), tiled.col or whole.col or plain(1)

    # -- products ------------------------------------------------------------------------------------------------
    def fprop(self, x: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See :class:`snip_megatron.gemm.backend.GemmBackend`."""
        if isinstance(x, Operand) and isinstance(w, Operand):
            return self._products.multiply(x, w, dtype)
        x, w = _plain(x), _plain(w)
        return reference.fprop(x.tensor, w.tensor, x.format, amax=(x.amax, w.amax), out_dtype=dtype)

    def dgrad(self, g: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See :class:`snip_megatron.gemm.backend.GemmBackend`."""
        if isinstance(g, Operand) and isinstance(w, Operand):
            return self._products.multiply(g, w, dtype)
        g, w = _plain(g), _plain(w)
        return reference.dgrad(
            g.tensor, w.tensor, g.format, seed=g.seed, cols=g.cols, amax=(g.amax, w.amax), out_dtype=dtype
        )

    def wgrad(self, g: Side, x: Side, *, out: Tensor | None) -> Tensor:
        """See :class:`snip_megatron.gemm.backend.GemmBackend`."""
        if isinstance(g, Operand) and isinstance(x, Operand):
            return self._products.accumulate(g, x, out)
        g, x = _plain(g), _plain(x)
        if g.format is Format.BF16:
            return self._products.accumulate_plain(g.tensor, x.tensor, out)
        return reference.wgrad(g.tensor, x.tensor, g.format, seed=g.seed, cols=g.cols, amax=(g.amax, x.amax), out=out)


def _plain(side: Side) -> Plain:
    """Both operands of a GEMM are of one kind: that of its format."""
    assert isinstance(side, Plain)
    return side
