"""How the norms that Megatron builds compute, so that RMSNorm can be fused with quantisation with their bits.

The orders of additions are those of torch 2.11 (``vectorized_layer_norm_kernel``) and of Transformer Engine 2.20
(``rmsnorm_fwd_tuned_kernel``). Another version may add up a row otherwise. Before a training they are therefore
compared on the device (:mod:`snip_megatron.layers.rmsnorm_check`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from snip_megatron.layers.rmsnorm import StockNorm
from snip_megatron.megatron.compat.te_rmsnorm import check_kernels, launch_backward, launch_forward, settings_of
from snip_megatron.quantization.rmsnorm import Order, RMSNorm

TORCH = Order(vector=4, warps=4, centred=False)
"""The order of torch's RMSNorm on CUDA, for every number of features that is a multiple of 512."""
TRANSFORMER_ENGINE = {
    features: Order(vector=8, warps=1 if features <= 2048 else 4, centred=True, rows=4)
    for features in (512, 768, 1024, 2048, 4096, 8192)
}
"""Number of features → the order of Transformer Engine's RMSNorm. For another one, its general kernel runs."""


def stock_norm(module: torch.nn.Module) -> StockNorm:
    """Return how a norm computes.

    Raises:
        LookupError: it is not known. The message says why.
    """
    if type(module) is torch.nn.RMSNorm:
        return _of_torch(module)
    if any(base.__name__ == "RMSNorm" and base.__module__.startswith("transformer_engine") for base in _bases(module)):
        return _of_transformer_engine(module)
    raise LookupError(f"the norm is a {type(module).__qualname__}")


def _bases(module: torch.nn.Module) -> list[type]:
    """Return the class of a module, which may be one that Megatron or SNIP has derived to replace methods."""
    own = type(module)
    return [own, *own.__bases__] if own.__module__.startswith("snip_megatron") else [own]


def _of_torch(module: torch.nn.RMSNorm) -> StockNorm:
    features, functions = list(module.normalized_shape), torch.ops.aten
    if module.eps is None or module.weight is None:
        raise LookupError("the norm has no ε or no weight")
    if not hasattr(functions, "_fused_rms_norm") or not hasattr(functions, "_fused_rms_norm_backward"):
        raise LookupError(f"torch {torch.__version__} has no _fused_rms_norm")
    eps = float(module.eps)

    def forward(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        y, rs = functions._fused_rms_norm(x, features, gamma, eps)
        return y, rs.view(-1)

    def backward(d: Tensor, x: Tensor, gamma: Tensor, rs: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_gamma = functions._fused_rms_norm_backward(d, x, features, rs.view(-1, 1), gamma, [True, True])
        return of_x, of_gamma

    return StockNorm(RMSNorm(TORCH, eps), forward, backward)


def _of_transformer_engine(module: Any) -> StockNorm:
    features = module.weight.shape[-1]
    if features not in TRANSFORMER_ENGINE:
        raise LookupError(f"the order of additions of Transformer Engine's norm is not known for {features} features")
    try:
        settings = settings_of(module)
        check_kernels()
    except (ImportError, AttributeError) as error:
        raise LookupError(f"this version of Transformer Engine has another norm: {error}") from None
    rule = RMSNorm(TRANSFORMER_ENGINE[features], float(settings.eps), bool(settings.zero_centred))
    return StockNorm(rule, partial(launch_forward, settings), partial(launch_backward, settings))
