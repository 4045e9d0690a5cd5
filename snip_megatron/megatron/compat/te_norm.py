"""The norm inside Transformer Engine's fused linears, by its own kernels.

They are launched directly. Transformer Engine's modules for norms read recipes and build lists of operations in every
call, which takes more host time than the kernels need.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex  # type: ignore[import-not-found]
from torch.nn import functional
from transformer_engine.pytorch.constants import TE_DType


def normalized(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the norm of x [..., K] that a ``LayerNormLinear`` takes before its GEMM, in x's dtype.

    Transformer Engine has no kernels for a CPU. There torch computes the norm, in FP32.
    """
    if x.is_cuda:
        y: torch.Tensor = _Norm.apply(x, linear.layer_norm_weight, linear.layer_norm_bias, linear)  # type: ignore[no-untyped-call]
        return y
    gamma = linear.layer_norm_weight.float() + float(linear.zero_centered_gamma)
    if linear.normalization == "RMSNorm":
        return functional.rms_norm(x.float(), gamma.shape, gamma, linear.eps).to(x.dtype)
    return functional.layer_norm(x.float(), gamma.shape, gamma, linear.layer_norm_bias.float(), linear.eps).to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, linear: Any) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        launch, parameters = (tex.rmsnorm_fwd, (gamma,)) if beta is None else (tex.layernorm_fwd, (gamma, beta))
        how = (linear.eps, None, None, TE_DType[x.dtype], linear.fwd_ln_sm_margin, linear.zero_centered_gamma)
        y, mean, rsigma = launch(rows, *parameters, *how)
        ctx.save_for_backward(rows, gamma, mean, rsigma)
        ctx.linear, ctx.has_beta = linear, beta is not None
        return y.view(x.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        rows, gamma, mean, rsigma = ctx.saved_tensors
        g, linear = grad_outputs[0], ctx.linear
        flat, how = g.reshape(rows.shape).contiguous(), (linear.bwd_ln_sm_margin, linear.zero_centered_gamma)
        if ctx.has_beta:
            d, d_gamma, d_beta = tex.layernorm_bwd(flat, rows, mean, rsigma, gamma, *how)
        else:
            (d, d_gamma), d_beta = tex.rmsnorm_bwd(flat, rows, rsigma, gamma, *how), None
        return d.view(g.shape), d_gamma, d_beta, None
