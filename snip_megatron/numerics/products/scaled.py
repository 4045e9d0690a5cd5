"""Products of quantised operands on a Hopper GPU by DeepGEMM, cuBLASLt or torch's scaled GEMM.

cuBLAS multiplies A·Bᵀ if the rows of A are a multiple of 4, the rows of B of 16 and the reduction of 128. The reduction
is padded when operands are made, and the rows of A are padded here. Products with other numbers of rows of B are
dequantised and multiplied in FP32.
"""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from snip_megatron.numerics.products.cublaslt import CublasLt
from snip_megatron.numerics.products.deepgemm import DeepGemm, difference
from snip_megatron.numerics.products.proposals import Choices
from snip_megatron.numerics.products.reference import unrounded
from snip_megatron.numerics.quantize.operands import Operand

_ROWS_OF_A, _ROWS_OF_B = 4, 16
_RECIPES = {
    "tile": ScalingType.BlockWise1x128,
    "block": ScalingType.BlockWise128x128,
    "tensor": ScalingType.TensorWise,
}
_OUTPUTS = (torch.bfloat16, torch.float32)


class ScaledProducts:
    """The library GEMMs of :class:`snip_megatron.numerics.products.hopper.HopperBackend`.

    Args:
        scaled_mm: ``torch.nn.functional.scaled_mm``; tests on a CPU pass an emulation.
        library: cuBLASLt, which accumulates inside the GEMM. If it is None, ``scaled_mm`` multiplies and accumulation
            is a separate addition.
        choices: products for which another than the first of cuBLASLt's proposals is used.
        faster: DeepGEMM, which is tried first; None if it is not used.
    """

    def __init__(
        self,
        scaled_mm: Callable[..., Tensor] = functional.scaled_mm,
        library: CublasLt | None = None,
        choices: Choices = MappingProxyType({}),
        faster: DeepGemm | None = None,
    ) -> None:
        self._scaled_mm = scaled_mm
        self._library = library
        self._choices = choices
        self._faster = faster

    def check(self, device: torch.device | str) -> str | None:
        """Compare DeepGEMM with cuBLASLt, which multiplies from now on if they differ. Returns what is wrong, or None.

        DeepGEMM compiles a kernel for it, unless its cache has the kernel.
        """
        fault = None if self._faster is None else difference(self._faster, self._library, device)
        if fault is not None:
            self._faster = None
        return fault

    def multiply(
        self, a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = True, out: Tensor | None = None
    ) -> Tensor:
        """Compute a·bᵀ [a.rows, b.rows] in ``dtype``.

        Args:
            a, b: the operands.
            dtype: dtype of the result.
            fast: whether to use the tensor core's fast accumulation, with a relative error of 5e-4 at a reduction of
                1,024 and 1e-3 at 8,192. It applies only to operands with one scale per tensor.
            out: memory for the result, which cuBLASLt writes there; None: new memory. Others return new memory.
        """
        if a.rows == 0 or not _runs(b):
            return (a.dequantize() @ b.dequantize().t()).to(dtype)
        fast = fast and a.scaling == "tensor"
        output = dtype if dtype in _OUTPUTS else torch.float32
        found = None
        if not a.rows % _ROWS_OF_A:
            found = None if self._faster is None else self._faster.multiply(a, b, output)
            if found is None and self._library is not None:  # torch's scaled GEMM asks for proposals in every call
                measured = fast and output is torch.bfloat16
                choice = self._choices.get((a.rows, b.rows, a.values.shape[1]), 0) if measured else 0
                own = out if output is dtype else None
                found = self._library.multiply(a, b, output, fast=fast, choice=choice, out=own)
        if found is None:
            found = self._scaled(a, b, output, fast=fast)
        return found if output is dtype else found.to(dtype)

    def _scaled(self, a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool) -> Tensor:
        padded = _padded(a)
        recipes = _RECIPES[a.scaling], _RECIPES[b.scaling]
        arguments = padded.values, b.values.t(), padded.scale, recipes[0], b.scale, recipes[1]
        return self._scaled_mm(*arguments, output_dtype=dtype, use_fast_accum=fast)[: a.rows]

    # -- accumulation --------------------------------------------------------------------------------------------
    def accumulate(self, a: Operand, b: Operand, out: Tensor | None) -> Tensor:
        """Compute a·bᵀ [a.rows, b.rows] in FP32 without fast accumulation. It is added to ``out`` if given."""
        if out is None:
            return self.multiply(a, b, torch.float32, fast=False)
        fits = a.rows % _ROWS_OF_A == 0 and _runs(b) and _is_gradient(out)
        library = self._library if fits else None
        if library is None or library.multiply(a, b, out.dtype, out=out, add=True) is None:
            out.add_(self.multiply(a, b, torch.float32, fast=False))
        return out

    def accumulate_plain(self, g: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        """Compute gᵀ·x [N, K] in FP32 for unquantised g [T, N] and x [T, K]. It is added to ``out`` if given."""
        if out is None:
            return unrounded(g.t(), x)
        fits = _row_major(g) and _row_major(x) and _is_gradient(out) and g.shape[0] > 0
        library, turned = self._library if fits else None, (True, False)
        if library is None or library.multiply_plain(g, x, out.dtype, transposed=turned, out=out, add=True) is None:
            out.add_(unrounded(g.t(), x))
        return out


def _runs(b: Operand) -> bool:
    return b.rows > 0 and b.rows % _ROWS_OF_B == 0 and b.values.shape[1] > 0


def _padded(a: Operand) -> Operand:
    """Return ``a``, padded with zero rows to a multiple of 4."""
    missing = -a.rows % _ROWS_OF_A
    if not missing:
        return a
    values = functional.pad(a.values.view(torch.uint8), (0, 0, 0, missing)).view(a.values.dtype)
    if a.scaling == "tensor":
        return a._replace(values=values)
    scale = torch.ones(a.scale.shape[1], a.rows + missing, dtype=a.scale.dtype, device=a.scale.device).t()
    scale[: a.rows] = a.scale
    return a._replace(values=values, scale=scale)


def _row_major(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.dtype is not torch.float32


def _is_gradient(out: Tensor) -> bool:
    """Return whether cuBLASLt can accumulate into ``out``: FP32 or bf16, row-major, rows aligned to 16 bytes."""
    aligned = out.data_ptr() % 16 == 0 and out.shape[1] * out.itemsize % 16 == 0
    return out.dtype in _OUTPUTS and out.is_contiguous() and aligned
