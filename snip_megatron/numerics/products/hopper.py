"""The GEMMs of a linear on Hopper's FP8 tensor cores. One Triton kernel quantises a tensor for both of its GEMMs.

In fp8 and fp4, fprop and dgrad multiply operands in 1×128 tiles by operands in 128×128 blocks, and both operands of
wgrad are in 1×128 tiles. An E2M1 number is exact in E4M3, so that fp4 has its own numerics at the speed of fp8.
fp8_tensor has one scale per tensor. Another backend runs GEMMs in the other formats. See README.md.

cuBLASLt multiplies A·Bᵀ if the rows of A are a multiple of 4, the rows of B of 16 and the reduction of 128. The
reduction is padded when operands are made, and the rows of A are padded here. Products with other numbers of rows of B
are dequantised and multiplied in FP32.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend, GemmOperand
from snip_megatron.numerics.products.cublaslt import Choices, CublasLt, is_gradient
from snip_megatron.numerics.products.deepgemm import DeepGemm, difference, unit_operands
from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.numerics.products.grouped_hopper import HopperGroups, add_wgrad
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.operands import TILED, CachedPair, Operand, OperandPair, OperandSpec, RowMap
from snip_megatron.precision import Format, FormatPair, Gemm

NATIVE = frozenset((*TILED, Format.FP8_TENSOR, Format.BF16))  # formats that these tensor cores multiply
_TILED, _QUANTIZED = frozenset(TILED), NATIVE - {Format.BF16}
_OTHERS = frozenset(Format) - _QUANTIZED
_ROWS_OF_A, _ROWS_OF_B = 4, 16
_OUTPUTS = (torch.bfloat16, torch.float32)


@dataclass(eq=False)
class HopperBackend(GemmBackend):
    """GEMMs on the FP8 tensor cores of a Hopper GPU."""

    quantizers: Any  # the module ``quantize.operands``, or ``quantize.kernels.quantize``, its functions in Triton
    library: CublasLt  # tests on a CPU pass an emulation
    _: KW_ONLY
    choices: Choices = MappingProxyType({})  # products that use another proposal of cuBLASLt than the first
    deepgemm: DeepGemm | None = None  # multiplies where it is faster than ``library``. None if it is not used
    fallback: GemmBackend = REFERENCE  # runs GEMMs in bf16, and in formats that these tensor cores do not have
    activations: Any = None  # the module ``quantize.swiglu``, or its functions in Triton. None: SwiGLU is not fused
    # DeepGEMM's module, for grouped products in fp8 and fp4. If it is None, these run expert by expert
    groups: Any = None
    # :func:`snip_megatron.numerics.products.grouped_wgrad.add_wgrad`, or its reference
    add_wgrad: Callable[..., None] = add_wgrad

    name = "hopper"

    def __post_init__(self) -> None:
        self.products = "cuBLASLt" if self.groups is None else "DeepGEMM"
        self.fuses_swiglu = self.activations is not None

    def check(
        self, device: torch.device | str, formats: Collection[Format], sizes: Collection[tuple[int, int, int]] = ()
    ) -> str | None:
        """See the base class. DeepGEMM is compared with cuBLASLt, and disabled if they differ."""
        fault = None if self.deepgemm is None else difference(self.deepgemm, self.library, device)
        if fault is not None:
            self.disable_deepgemm()
        if self.deepgemm is not None and not _TILED.isdisjoint(formats):
            with suppress(torch.OutOfMemoryError):  # what is not timed now is timed by its first product
                for rows, n, k in sizes:
                    for edge, depth in ((n, k), (k, n)):  # fprop and dgrad
                        operands = unit_operands(rows, edge, depth, device)
                        self.deepgemm.multiply(*operands, torch.bfloat16, self.library)
        faults = fault and f"{fault}: cuBLASLt multiplies", self.fallback.check(device, _OTHERS.intersection(formats))
        return "; ".join(filter(None, faults)) or None

    def disable_deepgemm(self) -> None:
        if self.deepgemm is not None:
            self.deepgemm = self.groups = None
            self.products = "cuBLASLt"

    def swiglu_kernel(self, y: Tensor, formats: FormatPair) -> str | None:
        """See the base class. Formats with tiles are made in the pass that computes SwiGLU."""
        if self.activations is None or not self.activations.fits(y):
            return None
        if {*_TILED, None}.issuperset(formats):
            return "quantize"
        return "amax" if Format.FP8_TENSOR in formats and {*NATIVE, None}.issuperset(formats) else None

    def swiglu(
        self, y: Tensor, d: Tensor | None, spec: OperandSpec | None, probs: Tensor | None = None
    ) -> tuple[Any, ...]:
        kernels = self.activations
        assert kernels is not None
        result: tuple[Any, ...]
        if spec is None:
            result = kernels.swiglu_with_amax(y, d)
        elif d is None:
            result = kernels.quantize_swiglu(y, spec, probs)
        else:
            result = kernels.quantize_swiglu_gradient(d, y, spec, probs)
        return result if probs is not None else result[:2]

    def quantize(
        self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None, rows: RowMap | None = None
    ) -> OperandPair:
        """See the base class. With ``rows``, x has no padding, and its padded rows are quantised in tiles."""
        row, col = None, None
        if not _QUANTIZED.isdisjoint(spec.formats):
            row, col = self.quantizers.quantize_operands(x, spec, cached, rows)
        other_formats = spec.only(_OTHERS)
        if other_formats.formats != (None, None):
            of_fallback = self.fallback.quantize(x, other_formats, cached)
            row, col = row or of_fallback[0], col or of_fallback[1]
        return (row, col) if cached is None else cached.operands

    def multiply(
        self, gemm: Gemm, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """See the base class. Per-tensor scaled fprop and dgrad use the tensor core's fast accumulation, wgrad not."""
        if not (isinstance(a, Operand) and isinstance(b, Operand)):
            return self.fallback.multiply(gemm, a, b, dtype, out)
        wgrad, padding = gemm is Gemm.WGRAD, -a.rows % _ROWS_OF_A
        if padding:
            padded = self.multiply(gemm, _padded(a, padding), b, dtype)[:-padding]
            return out.add_(padded) if wgrad and out is not None else padded
        output = torch.float32 if wgrad or dtype not in _OUTPUTS else dtype
        product: Tensor | None = None
        if a.rows > 0 and b.rows > 0 and b.rows % _ROWS_OF_B == 0 and b.values.shape[1] > 0:
            if self.deepgemm is not None and not wgrad:
                product = self.deepgemm.multiply(a, b, output, self.library)
            if product is None:
                fast, choice = a.scaling == "tensor" and not wgrad, 0
                if fast and output is torch.bfloat16:
                    choice = self.choices.get((a.rows, b.rows, a.values.shape[1]), 0)
                if wgrad and out is not None and is_gradient(out):
                    product = self.library.multiply(a, b, out.dtype, out=out, add=True)
                    if product is not None:
                        return out
                target = out if output is dtype and not wgrad else None
                product = self.library.multiply(a, b, output, fast=fast, choice=choice, out=target)
        if product is None:  # cuBLASLt has no kernel
            product = a.dequantize() @ b.dequantize().t()
        if wgrad and out is not None:
            return out.add_(product)
        return product if product.dtype is dtype else product.to(dtype)

    def grouped(self, n: int, k: int, dtype: torch.dtype) -> GroupLoop:
        if n % TILE or k % TILE or dtype is not torch.bfloat16:
            return super().grouped(n, k, dtype)
        return HopperGroups(self)


def _padded(a: Operand, padding: int) -> Operand:
    """Return ``a`` with ``padding`` more rows, which are zero."""
    values = functional.pad(a.values.view(torch.uint8), (0, 0, 0, padding)).view(a.values.dtype)
    if a.scaling == "tensor":
        return a._replace(values=values)
    # One column more, as in empty_tiles.
    columns = torch.ones(a.scale.shape[1] + 1, a.rows + padding, dtype=a.scale.dtype, device=a.scale.device)
    scale = columns[:-1].t()
    scale[: a.rows] = a.scale
    return a._replace(values=values, scale=scale)
