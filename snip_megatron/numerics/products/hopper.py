"""The GEMMs of a linear on Hopper's FP8 tensor cores. One Triton kernel quantises a tensor for both of its GEMMs.

In fp8 and fp4, fprop and dgrad multiply operands in 1×128 tiles by operands in 128×128 blocks, and both operands of
wgrad are in 1×128 tiles. Scales are FP32. An E2M1 number is exact in E4M3, so that fp4 has its own numerics at the
speed of fp8. fp8_tensor has one scale per tensor. bf16 GEMMs are library GEMMs. Another backend runs GEMMs in the other
formats. See README.md.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import REFERENCE, Formats, GemmBackend
from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.numerics.products.grouped_hopper import HopperGroups, add_wgrad
from snip_megatron.numerics.products.operands import GemmOperand, UnquantizedOperand
from snip_megatron.numerics.products.scaled import ScaledProducts
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.operands import TILED, CachedPair, Operand, OperandPair, OperandSpec, RowMap
from snip_megatron.precision import Format, Gemm

NATIVE = frozenset((*TILED, Format.FP8_TENSOR, Format.BF16))
"""Formats that these tensor cores multiply."""
_TILED, _QUANTIZED = frozenset(TILED), NATIVE - {Format.BF16}
_OTHERS = frozenset(Format) - _QUANTIZED


class HopperBackend(GemmBackend):
    """GEMMs on the FP8 tensor cores of a Hopper GPU.

    Args:
        quantizers: the module ``quantize.operands``, or ``quantize.kernels.quantize``, its functions in Triton.
        products: the library GEMMs.
        others: the backend that runs GEMMs in formats that these tensor cores do not have.
        activations: the module ``quantize.swiglu``, or its functions in Triton; None if SwiGLU is not fused.
        groups: DeepGEMM's module, for grouped products in fp8 and fp4; None: these run expert by expert.
        add_wgrad: :func:`snip_megatron.numerics.products.grouped_wgrad.add_wgrad`, or its reference.
    """

    name = "hopper"

    def __init__(
        self,
        quantizers: Any,
        products: ScaledProducts,
        others: GemmBackend = REFERENCE,
        activations: Any = None,
        groups: Any = None,
        add_wgrad: Callable[..., None] = add_wgrad,
    ) -> None:
        self._quantizers = quantizers
        self._products = self.plain_products = products
        self._others = others
        self._activations = activations
        self._groups, self.products = groups, "cuBLASLt" if groups is None else "DeepGEMM"
        self._add_wgrad = add_wgrad
        self.fuses_swiglu = activations is not None

    def check(self, device: torch.device | str, formats: Collection[Format]) -> str | None:
        fault = self._products.check(device)
        if fault is not None:
            self._groups = None
        faults = fault and f"{fault}: cuBLASLt multiplies", self._others.check(device, _OTHERS.intersection(formats))
        return "; ".join(filter(None, faults)) or None

    def swiglu_kernel(self, y: Tensor, formats: Formats) -> str | None:
        """See the base class. Formats with tiles are made in the pass that computes SwiGLU."""
        if self._activations is None or not self._activations.fits(y):
            return None
        if {*_TILED, None}.issuperset(formats):
            return "quantize"
        return "amax" if Format.FP8_TENSOR in formats and {*NATIVE, None}.issuperset(formats) else None

    def swiglu(
        self, y: Tensor, d: Tensor | None, spec: OperandSpec | None, probs: Tensor | None = None
    ) -> tuple[Any, ...]:
        kernels = self._activations
        assert kernels is not None
        made: tuple[Any, ...]
        if spec is None:
            made = kernels.swiglu_with_amax(y, d)
        elif d is None:
            made = kernels.quantize_swiglu(y, spec, probs)
        else:
            made = kernels.quantize_swiglu_gradient(d, y, spec, probs)
        return made if probs is not None else made[:2]

    def quantize(
        self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None, rows: RowMap | None = None
    ) -> OperandPair:
        """See the base class. One read serves both GEMMs if both formats have tiles, or both one scale per tensor.

        With ``rows``, the padded rows of x, which has no padding, are quantised in tiles.
        """
        row, col = None, None
        if not _QUANTIZED.isdisjoint(spec.formats):
            row, col = self._quantizers.quantize_operands(x, spec, cached, rows)
        left = spec.only(_OTHERS)
        if left.formats != (None, None):
            rest = self._others.quantize(x, left, cached)
            row, col = row or rest[0], col or rest[1]
        return (row, col) if cached is None else cached.operands

    def multiply(
        self, gemm: Gemm, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(a, Operand) and isinstance(b, Operand):
            if gemm is Gemm.WGRAD:
                return self._products.accumulate(a, b, out)
            return self._products.multiply(a, b, dtype, out=out)
        if isinstance(a, UnquantizedOperand) and a.format is Format.BF16:
            return super().multiply(gemm, a, b, dtype, out)
        return self._others.multiply(gemm, a, b, dtype, out)

    def grouped(self, n: int, k: int, dtype: torch.dtype) -> GroupLoop:
        if n % TILE or k % TILE or dtype is not torch.bfloat16:
            return super().grouped(n, k, dtype)
        swiglu = None if self._activations is None else self.swiglu
        return HopperGroups(self.quantize, self.multiply, self._quantizers, self._add_wgrad, self._groups, swiglu)
