"""The GEMMs of a linear on Hopper's FP8 tensor cores. One Triton kernel quantises a tensor for both of its GEMMs.

In fp8 and fp4, fprop and dgrad multiply operands in 1×128 tiles by operands in 128×128 blocks, and both operands of
wgrad are in 1×128 tiles. Scales are FP32. An E2M1 number is exact in E4M3, so that fp4 has its own numerics at the
speed of fp8. fp8_tensor has one scale per tensor. bf16 GEMMs are library GEMMs. Another backend runs GEMMs in the other
formats. See README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from snip_megatron.gemm.backend import REFERENCE, Formats, GemmBackend
from snip_megatron.gemm.grouped import GroupLoop
from snip_megatron.gemm.grouped_hopper import GroupQuantizers, HopperGroups
from snip_megatron.gemm.operands import CachedPair, GemmOperand, OperandPair, OperandSpec, UnquantizedOperand
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.gemm.shards import Packing, QuantizedShard, operand_shard
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization.formats import TILE
from snip_megatron.quantization.packed import STORED, CachedOperands, Operand, Operands

NATIVE = frozenset((*STORED, Format.FP8_TENSOR, Format.BF16))
"""Formats that these tensor cores multiply."""
_TILED, _QUANTIZED = frozenset(STORED), NATIVE - {Format.BF16}


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
        groups: the module that quantises for grouped products, and DeepGEMM's module; None without it.
    """

    name = "hopper"

    def __init__(
        self,
        quantizers: Quantizers,
        products: ScaledProducts,
        others: GemmBackend = REFERENCE,
        activations: Activations | None = None,
        groups: tuple[GroupQuantizers, Any] | None = None,
    ) -> None:
        self._quantizers = quantizers
        self._products = products
        self._others = others
        self._activations = activations
        self._groups = groups
        self.fuses_swiglu = activations is not None

    def check_gathers(self, formats: Collection[Format]) -> None:
        """See the base class."""
        if others := set(formats) - NATIVE:
            self._others.check_gathers(others)

    def swiglu_kernel(self, y: Tensor, formats: Formats) -> str | None:
        """See the base class. Formats with tiles are made in the pass that computes SwiGLU."""
        if self._activations is None or not self._activations.fits(y):
            return None
        if {*_TILED, None}.issuperset(formats):
            return "quantize"
        return "amax" if Format.FP8_TENSOR in formats and {*NATIVE, None}.issuperset(formats) else None

    def swiglu(self, y: Tensor, d: Tensor | None, spec: OperandSpec | None) -> tuple[Any, Any]:
        """See the base class."""
        kernels = self._activations
        assert kernels is not None
        if spec is None:
            return kernels.swiglu_with_amax(y) if d is None else kernels.swiglu_gradient_with_amax(d, y)
        if d is None or spec.keys is None:
            made = kernels.quantize_swiglu(y, spec.rowwise, spec.columnwise)
        else:
            dgrad, wgrad, cols, *_ = spec.keys
            made = kernels.quantize_swiglu_gradient(
                d, y, spec.rowwise, spec.columnwise, row_seed=dgrad, col_seed=wgrad, cols=cols
            )
        return made.row, made.col

    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        """See the base class. One read serves both GEMMs if both formats have tiles, or both one scale per tensor."""
        formats = spec.rowwise, spec.columnwise
        row = col = None
        if not _TILED.isdisjoint(formats):
            tiled = self._tiled(x, spec, formats, cached)
            row, col = tiled.row, tiled.col
        if Format.FP8_TENSOR in formats:
            wanted, held = [fmt is Format.FP8_TENSOR for fmt in formats], _held(cached, "tensor")
            whole = self._quantizers.quantize_tensor(x, row=wanted[0], col=wanted[1], amax=spec.amax, held=held)
            row, col = row or whole.row, col or whole.col
        left = [None if fmt in _QUANTIZED else fmt for fmt in formats]
        if left != [None, None]:
            rest = self._others.quantize(x, spec._replace(rowwise=left[0], columnwise=left[1]), cached)
            row, col = row or rest[0], col or rest[1]
        return (row, col) if cached is None else cached.operands

    def _tiled(self, x: Tensor, spec: OperandSpec, formats: Formats, cached: CachedPair | None) -> Operands:
        row, col = (fmt if fmt in _TILED else None for fmt in formats)
        if spec.weight:
            held = _held(cached, "block")
            blocks = self._quantizers.quantize_blocks(x, row, col, held=held)
            return self._products.prepared(blocks) if held is None else self._products.renewed(blocks)
        if spec.keys is None:
            return self._quantizers.quantize_tiles(x, row, col)
        dgrad, wgrad, cols, first_row, _ = spec.keys
        return self._quantizers.quantize_tiles(
            x, row, col, row_seed=dgrad, col_seed=wgrad, first_row=first_row, cols=cols
        )

    def multiply(
        self, gemm: Gemm, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """See the base class. A bf16 wgrad of a mixed linear is a library GEMM that accumulates into ``out``."""
        if isinstance(a, Operand) and isinstance(b, Operand):
            return self._products.accumulate(a, b, out) if gemm is Gemm.WGRAD else self._products.multiply(a, b, dtype)
        if gemm is Gemm.WGRAD and isinstance(a, UnquantizedOperand) and a.format is Format.BF16:
            assert isinstance(b, UnquantizedOperand)
            return self._products.accumulate_plain(a.tensor, b.tensor, out)
        return self._others.multiply(gemm, a, b, dtype, out)

    def grouped(self, n: int, k: int, dtype: torch.dtype) -> GroupLoop:
        """See the base class."""
        if self._groups is None or n % TILE or k % TILE or dtype is not torch.bfloat16:
            return super().grouped(n, k, dtype)
        return HopperGroups(self.quantize, self.multiply, *self._groups)

    def pack(self, operand: GemmOperand, format: Format, axis: int) -> QuantizedShard:
        """See the base class. Ranks exchange the operand as it is, except that fp4 is packed two elements to a byte."""
        if isinstance(operand, Operand):
            return operand_shard(operand, format, axis, self._quantizers)
        return self._others.pack(operand, format, axis)


def _held(cached: CachedPair | None, scaling: str) -> CachedOperands | None:
    """Return those of the cached operands that one call of a quantiser makes."""
    if cached is None:
        return None
    row, col = (each if isinstance(each, Operand) and each.scaling == scaling else None for each in cached.operands)
    return CachedOperands(Operands(row, col), cached.current)
