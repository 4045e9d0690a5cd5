"""What the GEMMs of a linear multiply, in plain torch. All other backends are compared with it.

X and G are quantised in tiles along the GEMM's reduction dimension (1×128 in fp8 and fp4), W in blocks (128×128). Only
G is rounded stochastically, in the formats of ``STOCHASTIC`` (how-it-works.md, Formats). Operands are dequantised to
FP32 and multiplied in FP32, so that the only error beside quantisation is that of FP32 summation.
"""

import torch
from torch import Tensor

from snip_megatron.numerics.products.operands import UnquantizedOperand
from snip_megatron.numerics.quantize import fake_quantize
from snip_megatron.precision import Format, Gemm


def numbers(operand: UnquantizedOperand) -> Tensor:
    """Return the numbers that a GEMM multiplies: the matrix itself in bf16, otherwise Q of it in FP32."""
    if operand.format is Format.BF16:
        return operand.tensor
    x, options = operand.spec.quantizer_arguments(operand.tensor, operand.axis)
    return fake_quantize(x, **options)


def unrounded(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in FP32."""
    if left.is_cuda and left.dtype is not torch.float32 and left.numel():
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def multiply(
    gemm: Gemm, a: UnquantizedOperand, b: UnquantizedOperand, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """See :meth:`snip_megatron.numerics.products.backend.GemmBackend.multiply`."""
    left, right = numbers(a), numbers(b)
    if gemm is Gemm.FPROP:
        return (left @ right.t()).to(dtype)
    if gemm is Gemm.DGRAD:
        return (left @ right).to(dtype)
    # Products of bf16 numbers are exact in FP32. Accumulating in bf16 would lose most of a small gradient.
    left, right = left.to(torch.float32), right.to(torch.float32)
    if out is not None and out.dtype is torch.float32:
        return out.addmm_(left.t(), right)
    product = left.t() @ right
    return product if out is None else out.add_(product)  # added in FP32
