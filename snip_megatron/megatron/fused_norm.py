"""Megatron's RMSNorms fused into the quantisation for the linear that reads their result (``--snip-fusions``).

These are the norm before ``linear_qkv`` and the one before ``linear_fc1`` of a dense MLP. Like linears, instances are
made by assigning the class of a built module. Parameters and checkpoints do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP

from snip_megatron.gemm.backend import GemmBackend
from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.rmsnorm import StockNorm, fused_norm, may_fuse
from snip_megatron.layers.rmsnorm_check import difference
from snip_megatron.megatron.compat.norms import stock_norm
from snip_megatron.megatron.fused_mlp import Fused, SnipMLP
from snip_megatron.precision import Format

Pair = tuple[Any, LinearHandle]
"""A norm and the linear that reads its result."""


class SnipNorm(torch.nn.Module):
    """A norm whose result is quantised where it is computed. A class derived from it and from the norm's is used."""

    snip_norm: StockNorm
    snip_linear: LinearHandle

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the norm itself if a probe or a measuring pass runs, or if the linear's formats have no kernel."""
        weight: Any = self.weight
        if args or kwargs or not may_fuse(x, weight, self.snip_linear):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        return fused_norm(x, weight, self.snip_linear, self.snip_norm)


def fuse_norms(
    layers: Sequence[torch.nn.Module],
    backend: GemmBackend,
    known: Callable[[torch.nn.Module], StockNorm] = stock_norm,
) -> Fused:
    """Fuse the RMSNorms of ``layers`` with the linears that read them.

    The fused norm is compared with the norm itself on this rank's device. If they differ in a bit, nothing is fused.

    Args:
        layers: decoder layers whose linears are converted.
        backend: the backend of their GEMMs.
        known: returns how a norm computes, or raises LookupError.
    """
    pairs = [(_unfused(norm), linear) for layer in layers for norm, linear in _pairs(layer)]
    reason = _why_not_at_all(layers)
    if reason is None and not pairs:
        reason = "this rank has no norm that only one quantised linear reads"
    try:
        stocks = [known(norm) for norm, _ in pairs] if reason is None else []
    except LookupError as error:
        reason = str(error.args[0])
    if reason is None:
        config: Any = layers[0].config
        reason = _why_not(pairs[0][0], stocks, backend, config.params_dtype)
    if reason is not None:
        return Fused("RMSNorm", "linears", 0, reason)
    for (norm, linear), stock in zip(pairs, stocks, strict=True):
        own: Any = type(norm)
        norm.__class__ = _fused_class(own)
        norm.snip_norm, norm.snip_linear, linear.norm = stock, linear, stock.norm
    return Fused("RMSNorm", "linears", len(pairs), None)


@functools.cache
def _fused_class(norm: Any) -> Any:
    return type(norm.__name__, (SnipNorm, norm), {"__module__": __name__})


def _unfused(norm: Any) -> Any:
    """Return a norm as it was built, also of a model that is converted again."""
    if isinstance(norm, SnipNorm):
        norm.__class__ = type(norm).__bases__[1]
        del norm.snip_norm, norm.snip_linear
    return norm


def _pairs(layer: Any) -> list[Pair]:
    """Return the norms of a layer whose result is nothing but the input of a converted linear."""
    config, found = layer.config, []
    recomputed = config.recompute_modules or [] if config.recompute_granularity == "selective" else []
    attention, mlp = layer.self_attention, layer.mlp
    if type(attention) is SelfAttention:
        found.append((layer.input_layernorm, getattr(attention.linear_qkv, "snip", None)))
    # A checkpoint of the MLP, and chunks of it in inference, begin between the norm and the linear.
    whole = "mlp" not in recomputed and getattr(config, "mlp_chunks_for_prefill", 1) == 1
    if type(mlp) in (MLP, SnipMLP) and whole:
        found.append((layer.pre_mlp_layernorm, getattr(mlp.linear_fc1, "snip", None)))
    return [(norm, linear) for norm, linear in found if isinstance(linear, LinearHandle)]


def _why_not_at_all(layers: Sequence[Any]) -> str | None:
    """Return why no norm of ``layers`` is fused, or None."""
    if not layers:
        return "this rank has no layer"
    config = layers[0].config
    recomputes = config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or [])
    for hindered, why in (
        (config.normalization != "RMSNorm", f"the norm is {config.normalization}"),
        (
            config.sequence_parallel and config.tensor_model_parallel_size > 1,
            "--sequence-parallel: shards are gathered",
        ),
        (recomputes, "--recompute-modules layernorm"),
        (config.apply_residual_connection_post_layernorm, "--apply-residual-connection-post-layernorm"),
        (config.fp32_residual_connection, "--fp32-residual-connection"),
        (getattr(config, "fused_residual_rmsnorm", False), "the norm is fused with the residual"),
        (config.cpu_offloading, "--cpu-offloading-num-layers"),
        (getattr(config, "fine_grained_activation_offloading", False), "--fine-grained-activation-offloading"),
    ):
        if hindered:
            return why
    return None


def _why_not(norm: Any, stocks: Sequence[StockNorm], backend: GemmBackend, dtype: torch.dtype) -> str | None:
    """Return why norms like ``norm`` are not fused, or None."""
    rule, features = stocks[0].norm, len(norm.weight)
    if any(stock.norm != rule for stock in stocks):
        return "norms differ"
    # Weights may still be FP32 here: Megatron casts a model after it is built.
    x, gamma = (torch.empty(size, dtype=dtype, device="meta") for size in ((rule.order.rows, features), (features,)))
    if not backend.quantizes_rmsnorm(x, gamma, rule, (Format.FP8, Format.FP8)):
        return f"the {backend.name} GEMMs have no kernel for {dtype} and {features} features"
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        differs = difference(backend, norm, stocks[0], device, dtype)
    except Exception as error:  # of a private function of another version: the training goes on without fusion
        return f"the comparison fails: {error}"[:200]
    return None if differs is None else f"{differs} would differ in a bit on this device"
