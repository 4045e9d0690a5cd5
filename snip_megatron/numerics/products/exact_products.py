"""Products of quantised operands whose numbers are exact in bf16, with FP32 accumulation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.cublaslt import CublasLt
from snip_megatron.numerics.products.reference import unrounded
from snip_megatron.numerics.products.scaled import ScaledProducts
from snip_megatron.numerics.quantize.operands import ExactOperand

_ALIGNED = 16  # bytes, of rows of a result that cuBLASLt writes
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


class ExactProducts:
    """The GEMMs of :class:`snip_megatron.numerics.products.emulated.EmulatedBackend`.

    Args:
        library: cuBLASLt, which scales and accumulates inside the GEMM. If it is None or has no kernel for operands,
            torch multiplies, and scaling and accumulation are separate operations.
        tiled: :func:`numerics.products.tiled_kernel.multiply`, which multiplies operands with a scale for each tile.
            If it is None, such operands are dequantised and multiplied in FP32.

    Attributes:
        plain: the products of matrices that are not quantised.
    """

    def __init__(self, library: CublasLt | None = None, tiled: Callable[..., None] | None = None) -> None:
        self._library = library
        self._tiled = tiled
        self.plain = ScaledProducts(library=library)

    def multiply(self, a: ExactOperand, b: ExactOperand, transposed: tuple[bool, bool], dtype: torch.dtype) -> Tensor:
        """Compute op(a)·op(b) in ``dtype``. ``transposed`` says of each operand whether op transposes it."""
        shape = (a.values.shape[1 if transposed[0] else 0], b.values.shape[0 if transposed[1] else 1])
        device = a.values.device
        if a.values.numel() == 0 or b.values.numel() == 0:
            return torch.zeros(shape, dtype=dtype, device=device)
        output = dtype if dtype in _OUTPUTS else torch.float32
        found = None
        if a.tile is not None and self._tiled is not None:
            found = torch.empty(shape, dtype=output, device=device)
            self._run_tiled(a, b, transposed, found, add=False)
        elif a.tile is None and self._library is not None and shape[1] * output.itemsize % _ALIGNED == 0:
            factor = _factor(a, b)
            found = self._library.multiply_plain(a.values, b.values, output, transposed=transposed, factor=factor)
        return _product(a, b, transposed).to(dtype) if found is None else found.to(dtype)

    def accumulate(self, g: ExactOperand, x: ExactOperand, out: Tensor | None) -> Tensor:
        """Compute gᵀ·x [N, K] in FP32. It is added to ``out`` if given."""
        if out is None:
            return self.multiply(g, x, (True, False), torch.float32)
        if g.values.numel() == 0 or x.values.numel() == 0:
            return out
        if not (out.dtype in _OUTPUTS and out.is_contiguous() and self._added(g, x, out)):
            out.add_(self.multiply(g, x, (True, False), torch.float32))
        return out

    def _added(self, g: ExactOperand, x: ExactOperand, out: Tensor) -> bool:
        """Add gᵀ·x to ``out``. Returns False, and does nothing, where no kernel can."""
        if g.tile is not None:
            if self._tiled is not None:
                self._run_tiled(g, x, (True, False), out, add=True)
            return self._tiled is not None
        aligned = out.data_ptr() % _ALIGNED == 0 and out.shape[1] * out.itemsize % _ALIGNED == 0
        if self._library is None or not aligned:
            return False
        how: dict[str, Any] = {"transposed": (True, False), "factor": _factor(g, x), "out": out, "add": True}
        return self._library.multiply_plain(g.values, x.values, out.dtype, **how) is not None

    def _run_tiled(
        self, a: ExactOperand, b: ExactOperand, transposed: tuple[bool, bool], out: Tensor, *, add: bool
    ) -> None:
        assert self._tiled is not None
        left, right = _along_reduction(a, transposed[0]), _along_reduction(b, not transposed[1])
        self._tiled(*left, *right, out, add=add)


def _along_reduction(side: ExactOperand, transposed: bool) -> tuple[Tensor, Tensor, int]:
    """Return values and scales with the reduction along the columns, and the number of rows that share a scale."""
    assert side.scale is not None
    assert side.tile is not None
    if transposed:
        return side.values.t(), side.scale.t(), side.tile[1]
    return side.values, side.scale, side.tile[0]


def _factor(a: ExactOperand, b: ExactOperand) -> Tensor | None:
    return None if a.scale is None or b.scale is None else a.scale * b.scale


def _product(a: ExactOperand, b: ExactOperand, transposed: tuple[bool, bool]) -> Tensor:
    """Return op(a)·op(b) in FP32 by torch."""
    pair = (each.values if each.tile is None else each.dequantize() for each in (a, b))
    product = unrounded(*(each.t() if turned else each for each, turned in zip(pair, transposed, strict=True)))
    factor = None if a.tile is not None else _factor(a, b)
    return product if factor is None else product.mul_(factor)
