"""The GEMMs of a linear in any format on the bf16 tensor cores of a GPU since Ampere, with the numerics of the format.

A Triton kernel writes the quantised numbers of an operand in bf16, where they are exact
(:mod:`numerics.quantize.operands`). Products of bf16 numbers are exact too, and are added in FP32. So the result
is that of the format's GEMM, up to the order of the FP32 additions, at nearly the speed of bf16.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import GemmBackend, GemmOperand, unrounded
from snip_megatron.numerics.products.check import wrong_numbers
from snip_megatron.numerics.products.cublaslt import CublasLt, is_gradient
from snip_megatron.numerics.quantize.formats import SPECS
from snip_megatron.numerics.quantize.kernels.launch import listings
from snip_megatron.numerics.quantize.operands import CachedPair, ExactOperand, OperandPair, OperandSpec
from snip_megatron.precision import Format, Gemm

_ALIGNED = 16  # bytes, of rows of a result that cuBLASLt writes
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(eq=False)
class EmulatedBackend(GemmBackend):
    """GEMMs of quantised formats by bf16 tensor cores."""

    # :func:`numerics.quantize.operands.quantize_exact`, or the same function in Triton
    quantize_exact: Callable[..., OperandPair]
    # cuBLASLt, which scales and accumulates inside the GEMM. If it is None or has no kernel for operands, torch
    # multiplies, and scaling and accumulation are separate operations
    library: CublasLt | None = None
    # :func:`numerics.products.tiled_kernel.multiply`, which multiplies operands with a scale for each tile. If it is
    # None, such operands are dequantised and multiplied in FP32
    tiled: Callable[..., None] | None = None
    _in_torch: bool = field(default=False, init=False)

    name = "emulated"

    def check(
        self, device: torch.device | str, formats: Collection[Format], sizes: Collection[tuple[int, int, int]] = ()
    ) -> str | None:
        fault = wrong_numbers(self, device, formats)
        if fault is None or listings:
            return None
        self._in_torch = True
        return f"{fault}: torch emulates, slower than bf16"

    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        plain, exact = super().quantize(x, spec, cached), spec.only(SPECS)
        if exact.formats == (None, None) or self._in_torch:
            return plain
        pair = self.quantize_exact(x, exact, cached)
        return (pair[0] or plain[0], pair[1] or plain[1]) if cached is None else cached.operands

    def multiply(
        self, gemm: Gemm, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        if not (isinstance(a, ExactOperand) and isinstance(b, ExactOperand)):
            return super().multiply(gemm, a, b, dtype, out)
        wgrad = gemm is Gemm.WGRAD
        transposed = wgrad, gemm is Gemm.FPROP
        if not wgrad or out is None:
            return self._product(a, b, transposed, dtype)
        if a.values.numel() and b.values.numel() and not self._run(a, b, transposed, out, add=True):
            out.add_(self._product(a, b, transposed, torch.float32))
        return out

    def accumulate_plain(self, g: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            return unrounded(g.t(), x)
        if self.library is not None and _row_major(g) and _row_major(x) and is_gradient(out) and g.shape[0] > 0:
            product = self.library.multiply(g, x, out.dtype, transposed=(True, False), out=out, add=True)
            if product is not None:
                return product
        return out.add_(unrounded(g.t(), x))

    def _product(self, a: ExactOperand, b: ExactOperand, transposed: tuple[bool, bool], dtype: torch.dtype) -> Tensor:
        """Compute op(a)·op(b) in ``dtype``. ``transposed`` says of each operand whether op transposes it."""
        shape = (a.values.shape[1 if transposed[0] else 0], b.values.shape[0 if transposed[1] else 1])
        if a.values.numel() == 0 or b.values.numel() == 0:
            return torch.zeros(shape, dtype=dtype, device=a.values.device)
        result = torch.empty(shape, dtype=dtype if dtype in _OUTPUTS else torch.float32, device=a.values.device)
        if not self._run(a, b, transposed, result, add=False):
            sides = (each.values if each.tile is None else each.dequantize() for each in (a, b))
            result = unrounded(*(each.t() if turned else each for each, turned in zip(sides, transposed, strict=True)))
            factor = None if a.tile is not None else _factor(a, b)
            result = result if factor is None else result.mul_(factor)
        return result.to(dtype)

    def _run(self, a: ExactOperand, b: ExactOperand, transposed: tuple[bool, bool], out: Tensor, *, add: bool) -> bool:
        """Write op(a)·op(b) to ``out``, or add it. Returns False, without doing anything, if there is no kernel."""
        if out.dtype not in _OUTPUTS or not out.is_contiguous():
            return False
        if a.tile is None:
            aligned = out.data_ptr() % _ALIGNED == 0 and out.shape[1] * out.itemsize % _ALIGNED == 0
            if self.library is None or not aligned:
                return False
            options: dict[str, Any] = {"transposed": transposed, "factor": _factor(a, b), "out": out, "add": add}
            return self.library.multiply(a.values, b.values, out.dtype, **options) is not None
        if self.tiled is not None:
            self.tiled(*_along_reduction(a, transposed[0]), *_along_reduction(b, not transposed[1]), out, add=add)
        return self.tiled is not None


def _along_reduction(side: ExactOperand, transposed: bool) -> tuple[Tensor, Tensor, int]:
    """Return values and scales with the reduction along the columns, and the number of rows that share a scale."""
    assert side.scale is not None
    assert side.tile is not None
    if transposed:
        return side.values.t(), side.scale.t(), side.tile[1]
    return side.values, side.scale, side.tile[0]


def _factor(a: ExactOperand, b: ExactOperand) -> Tensor | None:
    return None if a.scale is None or b.scale is None else a.scale * b.scale


def _row_major(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.dtype is not torch.float32
