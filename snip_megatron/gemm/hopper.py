"""The GEMMs of a linear on Hopper's FP8 tensor cores. One Triton kernel quantises a tensor for both of its GEMMs.

In fp8 and fp4, fprop and dgrad multiply operands in 1×128 tiles by operands in 128×128 blocks, and both operands of
wgrad are in 1×128 tiles. Scales are FP32. An E2M1 number is exact in E4M3, so that fp4 has its own numerics at the
speed of fp8. fp8_tensor has one scale per tensor. bf16 GEMMs are library GEMMs. Another backend runs GEMMs in the other
formats. See README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from snip_megatron.gemm.backend import REFERENCE, Formats, GemmBackend, Sides
from snip_megatron.gemm.operands import GradientKeys, HeldSides, Plain, Side
from snip_megatron.gemm.parcels import Packing, Parcel, operand_parcel
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.packed import STORED, Held, Operand, Operands
from snip_megatron.quantization.rounding import Key

NATIVE = frozenset((*STORED, Format.FP8_TENSOR, Format.BF16))
"""Formats that these tensor cores multiply."""
_NOTHING = Operands(None, None)


class Quantizers(Packing, Protocol):
    """The functions of ``quantization.packed``, which ``quantization.kernels.quantize`` has as Triton kernels."""

    quantize_tiles: Callable[..., Operands]
    quantize_blocks: Callable[..., Operands]
    quantize_tensor: Callable[..., Operands]


class Activations(Protocol):
    """The functions of ``quantization.swiglu`` and, as kernels, of ``quantization.kernels.swiglu``."""

    fits: Callable[..., bool]
    quantize_swiglu: Callable[..., Operands]
    quantize_swiglu_gradient: Callable[..., Operands]
    swiglu_with_amax: Callable[..., tuple[Tensor, Tensor]]
    swiglu_gradient_with_amax: Callable[..., tuple[Tensor, Tensor]]


class HopperBackend(GemmBackend):
    """GEMMs on the FP8 tensor cores of a Hopper GPU.

    Args:
        quantizers: the module that quantises.
        products: the library GEMMs.
        others: the backend that runs GEMMs in formats that these tensor cores do not have.
        activations: the module that quantises the results of activation functions; None if none does.
    """

    name = "hopper"

    def __init__(
        self,
        quantizers: Quantizers,
        products: ScaledProducts,
        others: GemmBackend = REFERENCE,
        activations: Activations | None = None,
    ) -> None:
        self._quantizers = quantizers
        self._products = products
        self._others = others
        self._activations = activations
        self.fuses_swiglu = activations is not None

    # -- quantisation --------------------------------------------------------------------------------------------
    def _quantize(
        self,
        x: Tensor,
        formats: Formats,
        amax: Tensor | None,
        *,
        weight: bool = False,
        keys: tuple[Key | None, Key | None] = (None, None),
        cols: Tensor | None = None,
        first_row: int = 0,
        rotation: Rotation | None = None,
    ) -> Sides:
        """See the base class. One read serves both GEMMs if both formats have tiles, or both one scale per tensor."""
        stored = [fmt if fmt in STORED else None for fmt in formats]
        scaled = [fmt is Format.FP8_TENSOR for fmt in formats]
        tiled = whole = _NOTHING
        if any(stored) and weight:
            tiled = self._products.prepared(self._quantizers.quantize_blocks(x, *stored))
        elif any(stored):
            tiled = self._quantizers.quantize_tiles(
                x, *stored, row_seed=keys[0], col_seed=keys[1], first_row=first_row, cols=cols
            )
        if any(scaled):
            whole = self._quantizers.quantize_tensor(x, row=scaled[0], col=scaled[1], amax=amax)
        rest = self._others._quantize(
            x, _of_others(formats), amax, weight=weight, keys=keys, cols=cols, first_row=first_row, rotation=rotation
        )
        return tiled.row or whole.row or rest[0], tiled.col or whole.col or rest[1]

    def quantizes_swiglu(self, y: Tensor, formats: Formats) -> bool:
        """See the base class. Formats with tiles are made in the pass that computes SwiGLU."""
        return self._activations is not None and {*STORED, None}.issuperset(formats) and self._activations.fits(y)

    def quantize_swiglu(self, y: Tensor, fprop: Format | None, wgrad: Format | None) -> Sides:
        """See the base class."""
        assert self._activations is not None
        found = self._activations.quantize_swiglu(y, fprop, wgrad)
        return found.row, found.col

    def quantize_swiglu_gradient(
        self, d: Tensor, y: Tensor, dgrad: Format | None, wgrad: Format | None, keys: GradientKeys
    ) -> Sides:
        """See the base class."""
        assert self._activations is not None
        found = self._activations.quantize_swiglu_gradient(
            d, y, dgrad, wgrad, row_seed=keys.dgrad, col_seed=keys.wgrad, cols=keys.cols
        )
        return found.row, found.col

    def finds_amax_of_swiglu(self, y: Tensor, formats: Formats) -> bool:
        """See the base class. A format with one scale per tensor is beside another or itself."""
        own = Format.FP8_TENSOR in formats and {*NATIVE, None}.issuperset(formats)
        return self._activations is not None and own and self._activations.fits(y)

    def swiglu_with_amax(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        assert self._activations is not None
        return self._activations.swiglu_with_amax(y)

    def swiglu_gradient_with_amax(self, d: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        assert self._activations is not None
        return self._activations.swiglu_gradient_with_amax(d, y)

    def check_gathers(self, formats: Collection[Format]) -> None:
        """See the base class."""
        if others := set(formats) - NATIVE:
            self._others.check_gathers(others)

    def pack(self, side: Side, format: Format, axis: int) -> Parcel:
        """See the base class. Ranks exchange the operand as it is, except that fp4 is packed two elements to a byte."""
        if isinstance(side, Operand):
            return operand_parcel(side, format, axis, self._quantizers)
        return self._others.pack(side, format, axis)

    def _renew(self, w: Tensor, formats: Formats, amax: Tensor | None, held: HeldSides) -> None:
        """See the base class."""
        blocks, whole = _held_by_scaling(held, "block"), _held_by_scaling(held, "tensor")
        if blocks is not None:
            self._quantizers.quantize_blocks(w, *_formats_of(blocks.operands, formats), held=blocks)
            self._products.renew(blocks.operands)
        if whole is not None:
            row, col = whole.operands.row is not None, whole.operands.col is not None
            self._quantizers.quantize_tensor(w, row=row, col=col, amax=amax, held=whole)
        self._others._renew(w, _of_others(formats), amax, held)

    # -- products ------------------------------------------------------------------------------------------------
    def fprop(self, x: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        if isinstance(x, Operand) and isinstance(w, Operand):
            return self._products.multiply(x, w, dtype)
        return self._others.fprop(x, w, dtype=dtype)

    def dgrad(self, g: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        if isinstance(g, Operand) and isinstance(w, Operand):
            return self._products.multiply(g, w, dtype)
        return self._others.dgrad(g, w, dtype=dtype)

    def wgrad(self, g: Side, x: Side, *, out: Tensor | None) -> Tensor:
        """See the base class. A bf16 wgrad of a mixed linear is a library GEMM that accumulates into ``out``."""
        if isinstance(g, Operand) and isinstance(x, Operand):
            return self._products.accumulate(g, x, out)
        if isinstance(g, Plain) and isinstance(x, Plain) and g.format is Format.BF16:
            return self._products.accumulate_plain(g.tensor, x.tensor, out)
        return self._others.wgrad(g, x, out=out)


def _held_by_scaling(held: HeldSides, scaling: str) -> Held | None:
    """Return those of the kept operands that one call of a quantiser makes, or None if there are none."""

    def of_kind(side: Side) -> Operand | None:
        return side if isinstance(side, Operand) and side.scaling == scaling else None

    row, col = map(of_kind, held.sides)
    return None if row is None and col is None else Held(Operands(row, col), held.current)


def _formats_of(operands: Operands, formats: Formats) -> Formats:
    return (None if operands.row is None else formats[0], None if operands.col is None else formats[1])


def _of_others(formats: Formats) -> Formats:
    """Return ``formats`` with None for those of this backend."""
    row, col = (None if fmt in NATIVE and fmt is not Format.BF16 else fmt for fmt in formats)
    return row, col
