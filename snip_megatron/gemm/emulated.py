"""The GEMMs of a linear in any format on the bf16 tensor cores of a GPU since Ampere, with the numerics of the format.

A Triton kernel writes the quantised numbers of an operand in bf16, where they are exact
(:mod:`snip_megatron.quantization.exact`). Products of bf16 numbers are exact too, and are added in FP32. So the result
is that of the format's own GEMM, up to the order of the FP32 additions, at nearly the speed of bf16. See README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from snip_megatron.gemm.backend import Formats, GemmBackend, Sides, refuse_gathers
from snip_megatron.gemm.exact_products import ExactProducts
from snip_megatron.gemm.operands import HeldSides, Plain, Side
from snip_megatron.precision import Format
from snip_megatron.quantization.exact import ExactOperand, ExactPair, HeldPair
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.rounding import Key


class EmulatedBackend(GemmBackend):
    """GEMMs of quantised formats by bf16 tensor cores.

    Args:
        quantize: :func:`snip_megatron.quantization.exact.quantize_exact`, or the same function in Triton.
        products: the GEMMs of its operands.
    """

    name = "emulated"

    def __init__(self, quantize: Callable[..., ExactPair], products: ExactProducts) -> None:
        self._quantize_exact = quantize
        self._products = products

    def check_gathers(self, formats: Collection[Format]) -> None:
        """See the base class. Gathers of quantised operands are not implemented for this backend."""
        refuse_gathers(self.name, formats)

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
        """See the base class."""
        row, col = _quantised(formats)
        plain = super()._quantize(x, formats, amax, keys=keys, cols=cols, first_row=first_row, rotation=rotation)
        if row is None and col is None:
            return plain
        made = self._quantize_exact(
            x,
            row,
            col,
            square=weight,
            row_seed=keys[0],
            col_seed=keys[1],
            cols=cols,
            amax=amax,
            rotation=rotation,
        )
        return made[0] or plain[0], made[1] or plain[1]

    def _renew(self, w: Tensor, formats: Formats, amax: Tensor | None, held: HeldSides) -> None:
        """See the base class."""
        row, col = _quantised(formats)
        if row is None and col is None:
            return
        first, second = (side if isinstance(side, ExactOperand) else None for side in held.sides)
        kept = HeldPair((first, second), held.current)
        self._quantize_exact(w, row, col, square=True, amax=amax, held=kept)

    # -- products ------------------------------------------------------------------------------------------------
    def fprop(self, x: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        if isinstance(x, ExactOperand) and isinstance(w, ExactOperand):
            return self._products.multiply(x, w, (False, True), dtype)
        return super().fprop(x, w, dtype=dtype)

    def dgrad(self, g: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        if isinstance(g, ExactOperand) and isinstance(w, ExactOperand):
            return self._products.multiply(g, w, (False, False), dtype)
        return super().dgrad(g, w, dtype=dtype)

    def wgrad(self, g: Side, x: Side, *, out: Tensor | None) -> Tensor:
        """See the base class. A bf16 wgrad of a mixed linear is a library GEMM that accumulates into ``out``."""
        if isinstance(g, ExactOperand) and isinstance(x, ExactOperand):
            return self._products.accumulate(g, x, out)
        if isinstance(g, Plain) and isinstance(x, Plain) and g.format is Format.BF16:
            return self._products.accumulate_plain(g.tensor, x.tensor, out)
        return super().wgrad(g, x, out=out)


def _quantised(formats: Formats) -> Formats:
    """Return ``formats`` with None for bf16."""
    row, col = (None if fmt is Format.BF16 else fmt for fmt in formats)
    return row, col
