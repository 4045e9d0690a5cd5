"""The GEMMs of a linear in any format on the bf16 tensor cores of a GPU since Ampere, with the numerics of the format.

A Triton kernel writes the quantised numbers of an operand in bf16, where they are exact
(:mod:`numerics.quantize.operands`). Products of bf16 numbers are exact too, and are added in FP32. So the result
is that of the format's own GEMM, up to the order of the FP32 additions, at nearly the speed of bf16. See README.md.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.check import wrong_numbers
from snip_megatron.numerics.products.exact_products import ExactProducts
from snip_megatron.numerics.products.operands import GemmOperand
from snip_megatron.numerics.quantize.formats import SPECS
from snip_megatron.numerics.quantize.kernels.launch import listings
from snip_megatron.numerics.quantize.operands import CachedPair, ExactOperand, OperandPair, OperandSpec
from snip_megatron.precision import Format, Gemm


class EmulatedBackend(GemmBackend):
    """GEMMs of quantised formats by bf16 tensor cores.

    :func:`numerics.quantize.operands.quantize_exact`, or the same function in Triton, quantises, and ``products``
    multiply.
    """

    name = "emulated"

    def __init__(self, quantize: Callable[..., OperandPair], products: ExactProducts) -> None:
        self._quantize_exact = quantize
        self._products = products
        self.plain_products = products.plain
        self._in_torch = False

    def check(self, device: torch.device | str, formats: Collection[Format]) -> str | None:
        fault = wrong_numbers(self, device, formats)
        if fault is None or listings:
            return None
        self._in_torch = True
        return f"{fault}: torch emulates, slower than bf16"

    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        plain, own = super().quantize(x, spec, cached), spec.only(SPECS)
        if own.formats == (None, None) or self._in_torch:
            return plain
        made = self._quantize_exact(x, own, cached)
        return (made[0] or plain[0], made[1] or plain[1]) if cached is None else cached.operands

    def multiply(
        self, gemm: Gemm, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(a, ExactOperand) and isinstance(b, ExactOperand):
            if gemm is Gemm.WGRAD:
                return self._products.accumulate(a, b, out)
            return self._products.multiply(a, b, (False, gemm is Gemm.FPROP), dtype)
        return super().multiply(gemm, a, b, dtype, out)
