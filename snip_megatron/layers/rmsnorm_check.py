"""Compares the fused RMSNorm with the norm that it replaces, on the device at hand, before a training uses it.

Another order of the additions of a row changes the last bits of its FP32 sum, which rarely show after rounding to bf16.
So the comparison reads the reciprocal RMS that the norm saves for its backward, and takes thousands of rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from snip_megatron.gemm.backend import GemmBackend, Sides
from snip_megatron.gemm.operands import disassemble
from snip_megatron.layers.rmsnorm import StockNorm
from snip_megatron.precision import Format

_SPREAD = 3.0  # of the logarithms of the sizes of rows
_BOTH = (Format.FP8, Format.FP8)


@torch.enable_grad()
def difference(
    backend: GemmBackend,
    module: torch.nn.Module,
    stock: StockNorm,
    device: torch.device,
    dtype: torch.dtype,
    rows: int = 4096,
) -> str | None:
    """Return what differs in a bit between the fused norm and the norm itself; None if nothing does.

    Args:
        backend: the backend, which has kernels for fp8.
        module: the norm, with a weight [K]. It is copied.
        stock: what is known of the norm.
        device: where to compare.
        dtype: the training dtype, of all matrices and of the weight.
        rows: number of rows that are compared.
    """
    probe: Any = copy.deepcopy(module).to(device, dtype)
    x, d, gamma = _numbers(probe.weight, rows, zero_centred=stock.norm.zero_centred)
    probe.weight.data.copy_(gamma)
    matrix = x.detach().clone()  # a backward may free what its forward has saved
    if not backend.quantizes_rmsnorm(matrix, gamma, stock.norm, _BOTH):
        return f"the {backend.name} GEMMs have no kernel for it"
    y = probe(x)
    y.backward(d)
    found, rs = stock.forward(matrix, gamma)
    own = backend.reciprocal_rms(matrix, stock.norm)
    if not torch.equal(rs.view_as(own), own):
        return f"the reciprocal RMS of {int((rs.view_as(own) != own).sum())} of {rows} rows"
    if not torch.equal(found, y):
        return "the norm itself called in another way"
    fused = backend.quantize_rmsnorm(matrix, gamma, own, stock.norm, *_BOTH)
    if not same(fused, backend.quantize_input(y.detach(), *_BOTH)):
        return "the result"
    gradients = stock.backward(d, matrix, gamma, own)
    if not all(torch.equal(a, b) for a, b in zip(gradients, (x.grad, probe.weight.grad), strict=True)):
        return "the gradient"
    return None


def same(fused: Sides, unfused: Sides) -> bool:
    """Return whether the values and scales of two pairs of operands are equal."""
    return all(
        torch.equal(a.float(), b.float())
        for found, expected in zip(fused, unfused, strict=True)
        for a, b in zip(disassemble(found)[0], disassemble(expected)[0], strict=True)
    )


def _numbers(weight: Tensor, rows: int, *, zero_centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of very different size and mean, gradients, and a weight, on the device of ``weight``."""
    generator = torch.Generator(weight.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=weight.device)

    features = weight.shape[0]
    x = (normal(rows, features) + normal(rows, 1)) * (_SPREAD * normal(rows, 1)).exp()
    gamma = normal(features) * 0.5 + (0.0 if zero_centred else 1.0)
    d = normal(rows, features) * 1e-3
    return x.to(weight.dtype).requires_grad_(), d.to(weight.dtype), gamma.to(weight.dtype)
