"""Transformer Engine's own recipes under a precision map, and its kernels for the norm in a fused linear."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex  # type: ignore[import-not-found]
from torch import Tensor
from torch.nn import functional
from transformer_engine.common.recipe import CustomRecipe, MMParams
from transformer_engine.pytorch.constants import TE_DType

from snip_megatron.layers.context import LinearHandle
from snip_megatron.numerics.products.transformer_engine import te_map
from snip_megatron.numerics.quantize.operands import OperandPair
from snip_megatron.precision import Format, Formats


@functools.cache
def recipe_of(formats: Formats) -> Any:
    """Return the recipe of a linear whose fprop, dgrad and wgrad have these formats."""
    names = tuple(fmt.value for fmt in formats)
    quantizer = te_map().quantizer
    recipe = CustomRecipe(qfactory=lambda role: quantizer(names, "" if role is None else role.tensor_type))
    if formats[0] is Format.FP8:  # cuBLAS multiplies tiles in no other way, and grouped linears ask the recipe
        recipe.fp8_gemm_fprop = MMParams(use_split_accumulator=True)
    return recipe


class StockState:
    """Keeps recipes of maps out of checkpoints, so that any model of Megatron can load the checkpoints."""

    def get_extra_state(self: Any) -> Tensor | None:
        """Return the empty state of a linear without a recipe if the recipe is one of a map, which has no state."""
        if isinstance(self.fp8_meta.get("recipe"), CustomRecipe):
            return torch.empty(0, dtype=torch.uint8)
        return super().get_extra_state()  # type: ignore[misc,no-any-return]


def forward_under(
    module: Any, handle: LinearHandle, weights: Sequence[Tensor], forward: Callable[..., Any], *arguments: Any
) -> Any:
    """Return ``forward(*arguments)`` of a stock linear in the formats of ``handle``. Its backward has them too.

    Megatron announces a new optimizer step to linears only where it quantises itself. The quantised weight is therefore
    dropped here as soon as the cache of ``handle`` is out of date.
    """
    recipe = recipe_of(handle.formats)

    def forget() -> OperandPair:
        module._fp8_workspaces.clear()
        return None, None

    handle.state.weights.get(recipe, weights, handle.formats[:2], forget)
    with te.autocast(enabled=True, recipe=recipe):
        return forward(*arguments)


def normalized(linear: Any, x: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """Return the norm of x [..., K] that a ``LayerNormLinear`` takes before its GEMM, in x's dtype, or in FP32.

    Transformer Engine has no kernels for a CPU. There, and for an exact norm, torch computes it in FP32.
    """
    if x.is_cuda and not exact:
        y: torch.Tensor = _Norm.apply(x, linear.layer_norm_weight, linear.layer_norm_bias, linear)  # type: ignore[no-untyped-call]
        return y
    gamma = linear.layer_norm_weight.float() + float(linear.zero_centered_gamma)
    if linear.normalization == "RMSNorm":
        y = functional.rms_norm(x.float(), gamma.shape, gamma, linear.eps)
    else:
        y = functional.layer_norm(x.float(), gamma.shape, gamma, linear.layer_norm_bias.float(), linear.eps)
    return y if exact else y.to(x.dtype)


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
