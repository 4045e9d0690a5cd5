"""Products of quantised operands on a Hopper GPU: by cuBLASLt, into FP32 gradients too; else torch's scaled GEMM.

What cuBLAS takes: A·Bᵀ with rows of A a multiple of 4, rows of B of 16, the reduction of 128 (operands are padded to
that when they are made). Rows of A are padded here; other odd shapes are dequantised and multiplied in FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from snip_megatron.gemm.cublaslt import CublasLt
from snip_megatron.gemm.proposals import Choices
from snip_megatron.quantization.packed import Operand

_ROWS_OF_A, _ROWS_OF_B = 4, 16
_RECIPES = {
    "tile": ScalingType.BlockWise1x128,
    "block": ScalingType.BlockWise128x128,
    "tensor": ScalingType.TensorWise,
}
ScaledMm = Callable[..., Tensor]
_OUTPUTS = (torch.bfloat16, torch.float32)


class ScaledProducts:
    """The library GEMMs of :class:`snip_megatron.gemm.hopper.HopperBackend`.

    Args:
        scaled_mm: ``torch.nn.functional.scaled_mm``; tests on a CPU pass an emulation.
        library: runs the products, accumulation inside the GEMM; None: ``scaled_mm``, then an addition.
        choices: products that are faster by another of the library's proposals than its first.
    """

    def __init__(
        self,
        scaled_mm: Callable[..., Tensor] = functional.scaled_mm,
        library: CublasLt | None = None,
        choices: Choices = MappingProxyType({}),
    ) -> None:
        self._scaled_mm = scaled_mm
        self._library = library
        self._choices = choices

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = True) -> Tensor:
        """a·bᵀ [a.rows, b.rows] in ``dtype``.

        Args:
            fast: with one scale a tensor, let the tensor core accumulate by itself (a relative error of 5e-4 at a
                reduction of 1,024, 1e-3 at 8,192); block-scaled products never do.
        """
        if a.rows == 0 or not _runs(b):
            return (a.dequantize() @ b.dequantize().t()).to(dtype)
        fast = fast and a.scaling == "tensor"
        output = dtype if dtype in _OUTPUTS else torch.float32
        found = self._by_library(a, b, output, fast=fast)
        if found is None:
            padded = _padded(a)
            found = self._scaled_mm(
                padded.values,
                b.values.t(),
                padded.scale,
                _RECIPES[a.scaling],
                b.scale,
                _RECIPES[b.scaling],
                output_dtype=output,
                use_fast_accum=fast,
            )[: a.rows]
        return found if output is dtype else found.to(dtype)

    def _by_library(self, a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool) -> Tensor | None:
        """The product without torch's detour, which asks the library for its proposals at every call; by a proposal
        that was measured to be faster where there is one. None: the library is not there or has no kernel."""
        if self._library is None or a.rows % _ROWS_OF_A:
            return None
        measured = fast and dtype is torch.bfloat16
        choice = self._choices.get((a.rows, b.rows, a.values.shape[1]), 0) if measured else 0
        out = torch.empty(a.rows, b.rows, dtype=dtype, device=a.values.device)
        return out if self._library.multiply(a, b, out, fast=fast, choice=choice) else None

    def accumulate(self, a: Operand, b: Operand, out: Tensor | None) -> Tensor:
        """a·bᵀ [a.rows, b.rows] in FP32, exactly accumulated; added to ``out`` when given."""
        if out is None:
            return self.multiply(a, b, torch.float32, fast=False)
        fits = a.rows % _ROWS_OF_A == 0 and _runs(b) and _is_gradient(out)
        if not (self._library is not None and fits and self._library.accumulate(a, b, out)):
            out.add_(self.multiply(a, b, torch.float32, fast=False))
        return out

    def accumulate_plain(self, g: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        """gᵀ·x [N, K] in FP32 of g [T, N], x [T, K] in bf16 or fp16; added to ``out`` when given."""
        if out is None:
            return _plain_product(g, x)
        fits = _row_major(g) and _row_major(x) and _is_gradient(out) and g.shape[0] > 0
        if not (self._library is not None and fits and self._library.accumulate_plain(g, x, out)):
            out.add_(_plain_product(g, x))
        return out


def _plain_product(g: Tensor, x: Tensor) -> Tensor:
    if g.is_cuda and g.dtype is not torch.float32 and g.numel():
        return torch.mm(g.t(), x, out_dtype=torch.float32)
    return g.t().to(torch.float32) @ x.to(torch.float32)


def _runs(b: Operand) -> bool:
    return b.rows > 0 and b.rows % _ROWS_OF_B == 0 and b.values.shape[1] > 0


def _padded(a: Operand) -> Operand:
    """``a`` with zero rows up to a multiple of 4."""
    missing = -a.rows % _ROWS_OF_A
    if not missing:
        return a
    values = functional.pad(a.values.view(torch.uint8), (0, 0, 0, missing)).view(a.values.dtype)
    if a.scaling == "tensor":
        return replace(a, values=values)
    scale = torch.ones(a.scale.shape[1], a.rows + missing, dtype=a.scale.dtype, device=a.scale.device).t()
    scale[: a.rows] = a.scale
    return replace(a, values=values, scale=scale)


def _row_major(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.dtype is not torch.float32


def _is_gradient(out: Tensor) -> bool:
    """Whether ``out`` can be accumulated into by the library: FP32, row-major, 16-byte aligned as kernels want it."""
    return out.dtype is torch.float32 and out.is_contiguous() and out.data_ptr() % 16 == 0 and out.shape[1] % 4 == 0
