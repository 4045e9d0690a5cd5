"""SwiGLU and its gradient, quantised for the GEMMs that read them. ``kernels/swiglu.py`` has these functions in Triton.

Tiles are quantised in the function that computes the result. A format with one scale per tensor needs the amax first,
so that the result is returned with its amax, and quantised by another function.

SwiGLU of y = [gates, ups] is silu(gates)·ups. All functions compute in FP32 and round once, to the dtype of y, before
they quantise. Megatron's functions do the same where torch.compile compiles them. The exponential and the division
differ between devices, so that the kernels' bits are those of Megatron's functions on the same GPU, and not always
those of this module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.packed import Operands, quantize_tiles
from snip_megatron.quantization.rounding import Key


def fits(y: Tensor) -> bool:
    """Return whether the functions below take y [M, 2K]. This module takes everything; the kernels do not."""
    return True


def swiglu(y: Tensor) -> Tensor:
    """Return SwiGLU [M, K] of y [M, 2K] in y's dtype."""
    gate, up = y.to(torch.float32).chunk(2, -1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(y.dtype)


def swiglu_gradient(d: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [M, 2K] of SwiGLU of y [M, 2K] in y's dtype, from the gradient d [M, K] of its result."""
    d, (gate, up) = d.to(torch.float32), y.to(torch.float32).chunk(2, -1)
    sigmoid = 1.0 / (1.0 + torch.exp(-gate))
    of_gate = d * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up
    return torch.cat((of_gate, d * (gate / (1.0 + torch.exp(-gate)))), -1).to(y.dtype)


def quantize_swiglu(y: Tensor, row_format: Format | None, col_format: Format | None) -> Operands:
    """Quantise SwiGLU [M, K] of y in 1×128 tiles along K and along M, each in a format of its own.

    Args:
        y: [M, 2K], gates first.
        row_format, col_format: fp8, fp4, or None to leave that operand out."""
    return quantize_tiles(swiglu(y), row_format, col_format)


def quantize_swiglu_gradient(
    d: Tensor,
    y: Tensor,
    row_format: Format | None,
    col_format: Format | None,
    *,
    row_seed: Key | None = None,
    col_seed: Key | None = None,
    cols: Tensor | None = None,
) -> Operands:
    """Quantise the gradient [M, 2K] of SwiGLU of y in 1×128 tiles along 2K and along M.

    Args:
        d: the gradient of the result, [M, K].
        y: the argument of SwiGLU, [M, 2K].
        row_format, col_format: fp8, fp4, or None to leave that operand out.
        row_seed, col_seed, cols: of stochastic rounding, as in
            :func:`snip_megatron.quantization.packed.quantize_tiles`."""
    return quantize_tiles(
        swiglu_gradient(d, y), row_format, col_format, row_seed=row_seed, col_seed=col_seed, cols=cols
    )


def swiglu_with_amax(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return SwiGLU [M, K] of y [M, 2K] in y's dtype, and max|·| of it, FP32 and 0-dim, NaN if it holds a NaN."""
    return _with_amax(swiglu(y))


def swiglu_gradient_with_amax(d: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient [M, 2K] of SwiGLU of y as :func:`swiglu_gradient` does, and its amax."""
    return _with_amax(swiglu_gradient(d, y))


def _with_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, (x.abs().amax() if x.numel() else x.new_zeros(())).to(torch.float32)
