"""RMSNorm before a linear, computed with the quantisation of its result.

Unfused, the norm writes its result in bf16, and the linear reads it to quantise it. Fused, one kernel computes the
reciprocal RMS of the rows, and another one reads the norm's input again and writes the operands. The backward is the
norm's own. Where the formats of the map in force have no kernel, the norm itself runs, so that the numbers of a
training do not depend on what is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.handover import hand_over, nothing
from snip_megatron.quantization.rmsnorm import RMSNorm


@dataclass(frozen=True)
class StockNorm:
    """A norm as the training computes it without fusion.

    Attributes:
        norm: its rule, with the order in which it adds up a row.
        forward: (x [T, K], weight [K]) → (result [T, K], reciprocal RMS, FP32 [T]).
        backward: (gradient of the result [T, K], x, weight, reciprocal RMS) → (gradient of x, gradient of the weight).
    """

    norm: RMSNorm
    forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def may_fuse(x: Tensor, gamma: Tensor, linear: LinearHandle) -> bool:
    """Return whether the next forward may be fused: not in probes, measuring passes and linears that are all bf16.

    Args:
        x: input of the norm [s, b, K].
        gamma: weight of the norm [K].
        linear: the linear that reads the result.
    """
    context = linear.context
    if linear.norm is None or context.probing or context.forcing is not None or linear.is_stock:
        return False
    fprop, _, wgrad = linear.formats
    formats = (fprop, wgrad if torch.is_grad_enabled() else None)
    return context.backend.quantizes_rmsnorm(_matrix(x.detach()), gamma.detach(), linear.norm, formats)


def fused_norm(x: Tensor, gamma: Tensor, linear: LinearHandle, stock: StockNorm) -> Tensor:
    """Return the input of ``linear`` [s, b, K]: the result of the norm, quantised.

    Args:
        x: input of the norm [s, b, K].
        gamma: weight of the norm [K].
        linear: the linear. Nothing else may use the result. :func:`may_fuse` holds.
        stock: the norm, whose backward runs.
    """
    backend, (fprop, _, wgrad) = linear.context.backend, linear.formats
    matrix, weight = _matrix(x.detach()), gamma.detach()
    rs = backend.reciprocal_rms(matrix, stock.norm)
    kept = wgrad if torch.is_grad_enabled() else None
    sides = backend.quantize_rmsnorm(matrix, weight, rs, stock.norm, fprop, kept)
    return hand_over(_FusedNorm.apply(x, gamma, rs, stock), sides)  # type: ignore[no-untyped-call]


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, rs: Tensor, stock: StockNorm) -> Tensor:
        """Return a tensor without numbers: they are quantised already."""
        ctx.save_for_backward(x, gamma, rs)
        ctx.stock = stock
        return nothing(x.shape, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Run the norm's own backward."""
        x, gamma, rs = ctx.saved_tensors
        of_x, of_gamma = ctx.stock.backward(_matrix(grad_outputs[0]).contiguous(), _matrix(x), gamma, rs)
        return of_x.view(x.shape), of_gamma, None, None


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
