"""SwiGLU and its gradient, quantised for the GEMMs that read them. ``kernels/swiglu.py`` has these functions in Triton.

SwiGLU of y = [gates, ups] is silu(gates)·ups. All functions compute in FP32 and round once, to the dtype of y, before
they quantise. The exponential and the division differ between devices, and so do bits.

Formats with tiles are quantised in the function that computes the result. A format with one scale per tensor needs the
amax first: :func:`swiglu_with_amax` returns the result and its amax, and another function quantises it.
"""

from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.operands import OperandPair, OperandSpec, quantize_operands
from snip_megatron.precision import Format


def fits(y: Tensor) -> bool:
    """Return whether the functions of this module take y [M, 2K]. Its kernels take fewer."""
    return True


def swiglu(y: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return SwiGLU [M, K] of y [M, 2K] in y's dtype. Rows are multiplied by ``probs``, FP32 [M], if given."""
    gate, up = y.to(torch.float32).chunk(2, -1)
    x = gate / (1.0 + torch.exp(-gate)) * up
    return (x if probs is None else x * probs.view(-1, 1)).to(y.dtype)


def swiglu_gradient(d: Tensor, y: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return the gradient [M, 2K] of :func:`swiglu` in y's dtype, from the gradient d [M, K] of its result."""
    d, (gate, up) = d.to(torch.float32), y.to(torch.float32).chunk(2, -1)
    d = d if probs is None else d * probs.view(-1, 1)
    sigmoid = 1.0 / (1.0 + torch.exp(-gate))
    gate_gradient = d * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up
    return torch.cat((gate_gradient, d * (gate / (1.0 + torch.exp(-gate)))), -1).to(y.dtype)


def quantize_swiglu(y: Tensor, spec: OperandSpec, probs: Tensor | None = None) -> OperandPair:
    """Quantise SwiGLU [M, K] of y [M, 2K], gates first, in 1×128 tiles: in fp8, in fp4, or not at all.

    In bf16 an operand is the matrix itself. ``probs``: see :func:`swiglu`.
    """
    return _operands(swiglu(y, probs), spec)


def quantize_swiglu_gradient(
    d: Tensor, y: Tensor, spec: OperandSpec, probs: Tensor | None = None
) -> tuple[Any, Any, Tensor | None]:
    """Quantise the gradient [M, 2K] of :func:`quantize_swiglu`, from the gradient d [M, K] of its result.

    Returns the two operands, and the gradient of ``probs``, FP32 [M], or None if there are no ``probs``.
    """
    probs_gradient = None if probs is None else (d.to(torch.float32) * swiglu(y.to(torch.float32))).sum(1)
    return (*_operands(swiglu_gradient(d, y, probs), spec), probs_gradient)


def _operands(x: Tensor, spec: OperandSpec) -> OperandPair:
    row, col = quantize_operands(x, spec)
    return x if spec.rowwise is Format.BF16 else row, x if spec.columnwise is Format.BF16 else col


def swiglu_with_amax(y: Tensor, d: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return SwiGLU [M, K] of y [M, 2K] or, with ``d``, its gradient [M, 2K] from the gradient d [M, K] of the result;
    in y's dtype, and its amax, FP32 and 0-dim, which is NaN if the matrix holds a NaN.
    """
    x = swiglu(y) if d is None else swiglu_gradient(d, y)
    return x, (x.abs().amax() if x.numel() else x.new_zeros(())).to(torch.float32)
