"""An RMSNorm whose additions have an order that can be followed, as the norms of a GPU do and torch's on a CPU not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snip_megatron.layers.rmsnorm import StockNorm
from snip_megatron.quantization import rmsnorm
from snip_megatron.quantization.rmsnorm import Order, RMSNorm

ORDER = Order(vector=4, warps=1, centred=True, rows=4)


def stock_of(module: Any) -> StockNorm:
    """How ``OrderedNorm`` computes."""
    norm = RMSNorm(ORDER, module.eps)

    def forward(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        rs = rmsnorm.reciprocal_rms(x, norm)
        return rmsnorm.rmsnorm(x, gamma, rs, norm), rs

    return StockNorm(norm, forward, backward)


def backward(d: Tensor, x: Tensor, gamma: Tensor, rs: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients in FP32, rounded once."""
    straight, scaled = d.float() * gamma.float(), x.float() * rs[:, None]
    of_x = rs[:, None] * (straight - scaled * (straight * scaled).mean(1, keepdim=True))
    return of_x.to(x.dtype), (d.float() * scaled).sum(0).to(gamma.dtype)


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, stock: StockNorm) -> Tensor:
        y, rs = stock.forward(x.reshape(-1, x.shape[-1]), gamma)
        ctx.save_for_backward(x, gamma, rs)
        ctx.stock = stock
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        x, gamma, rs = ctx.saved_tensors
        matrix = x.reshape(-1, x.shape[-1])
        of_x, of_gamma = ctx.stock.backward(grad_outputs[0].reshape(matrix.shape), matrix, gamma, rs)
        return of_x.view(x.shape), of_gamma, None


class OrderedNorm(torch.nn.RMSNorm):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        OrderedNorm.calls += 1
        return _Ordered.apply(x, self.weight, stock_of(self))  # type: ignore[no-any-return,no-untyped-call]
