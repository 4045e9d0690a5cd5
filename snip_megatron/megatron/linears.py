"""Megatron's parallel linears with quantised GEMMs, and its MLP with SwiGLU fused into the quantisation.

Instances are made by assigning one of these classes to ``__class__`` of a built module. The classes have no
``__init__`` and no parameters of their own, so checkpoints stay interchangeable with Megatron's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.mlp import MLP
from torch.nn import functional

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.swiglu import SwiGLU, fused_swiglu, may_fuse
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, quoted

_DEFAULTS = {"gtp_remat_size": 1}  # of arguments that quantised linears do not implement. None for all others
_OPTIONS = {"bias", "allreduce_dgrad", "sequence_parallel", "tp_group"}
_IGNORED = {"gradient_accumulation_fusion"}  # weight gradients are always accumulated into main_grad


def product(
    handle: LinearHandle, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **exchange: Any
) -> torch.Tensor:
    """Return X·Wᵀ (+ bias) in the formats of the precision map. ``exchange`` are arguments of :class:`LinearCall`."""
    override = handle.context.override
    requested = None if override is None else override(handle)
    call = LinearCall(handle, has_backward=torch.is_grad_enabled(), override=requested, **exchange)
    return QuantizedLinear.apply(x, weight, bias, call)  # type: ignore[no-untyped-call,no-any-return]


def may_reduce_scatter(handle: LinearHandle) -> bool:
    """Return whether a row-parallel linear under sequence parallelism reduce-scatters its output itself.

    It does so in training passes under the map, with or without gradients, because recomputation must repeat the
    forward. One autograd node then takes less host time than two.
    """
    context = handle.context
    return handle.tp_group is not None and not handle.is_stock and context.override is None and not context.probing


class _QuantizedForward:
    """Runs the GEMMs in the formats of the precision map. With three bf16 GEMMs, Megatron's own code runs."""

    snip: LinearHandle

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.snip.is_stock:
            return super()._forward_impl(input, weight, **kwargs)  # type: ignore[misc,no-any-return]
        options: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in _OPTIONS:
                options[name] = value
            elif name not in _IGNORED and value is not None and value != _DEFAULTS.get(name):
                raise SnipError(
                    f"{self.snip.name}: Megatron asks for {name}={quoted(value)}, which quantised linears do not have"
                )
        return product(self.snip, input, weight, **options)


class SnipColumnParallelLinear(_QuantizedForward, ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear whose GEMMs follow the precision map."""


class SnipColumnParallelLinearGathered(ColumnParallelLinearGathered, SnipColumnParallelLinear):  # type: ignore[misc]
    """A linear in place of a whole attention or MLP, in heterogeneous layers."""


class SnipRowParallelLinear(_QuantizedForward, RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear whose GEMMs follow the precision map."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the linear, and reduce its output over tensor parallel ranks. See :func:`may_reduce_scatter`."""
        shards = self.sequence_parallel and not self.explicit_expert_comm and not self.config.cpu_offloading
        if not (shards and may_reduce_scatter(self.snip)):
            return super().forward(input_)  # type: ignore[no-any-return]
        output = product(self.snip, input_, self.weight, tp_group=self.tp_group, reduce_scatter=True)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias if self.skip_bias_add else None
        return output + self.bias, None


STOCK = SwiGLU(swiglu, swiglu_back)
"""Megatron's functions. Megatron compiles them unless ``--disable-jit-fuser`` is given."""


class SnipMLP(MLP):  # type: ignore[misc]
    """An MLP of two converted linears that quantises SwiGLU where it is computed."""

    snip_swiglu: SwiGLU

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run Megatron's own code if a probe or a measuring pass runs, or if the map keeps both linears in bf16."""
        fc1, fc2 = self.linear_fc1.snip, self.linear_fc2.snip
        options = (per_token_scale, *kwargs.values())  # a layer passes padding_mask=None
        if any(option is not None for option in options) or not may_fuse(fc1, fc2):
            return super().forward(hidden_states, per_token_scale, **kwargs)  # type: ignore[no-any-return]
        y, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(fused_swiglu(y, fc1, fc2, self.snip_swiglu))  # type: ignore[no-any-return]


def fuse_swiglu(layers: Sequence[torch.nn.Module], backend: GemmBackend, stock: SwiGLU = STOCK) -> str:
    """Fuse SwiGLU in the dense MLPs of ``layers``, and return a phrase for the log.

    ``stock`` are the functions for passes in which nothing is fused.
    """
    candidates: list[Any] = [layer.mlp for layer in layers if type(layer.mlp) in (MLP, SnipMLP)]
    mlps = [mlp for mlp in candidates if hasattr(mlp.linear_fc1, "snip") and hasattr(mlp.linear_fc2, "snip")]
    if not mlps:
        return "no SwiGLU (this rank has no dense MLP of two quantised linears)"
    config, features = mlps[0].config, mlps[0].linear_fc2.weight.shape[1]
    why = why_no_swiglu(config)
    y = torch.empty(2, 2 * features, dtype=config.params_dtype, device="meta")
    if why is None and backend.swiglu_kernel(y, (Format.FP8, Format.FP8)) is None:
        why = f"the {backend.name} GEMMs have no kernel for {config.params_dtype} and {features} features a rank"
    if why is not None:
        return f"no SwiGLU ({why})"
    for mlp in mlps:
        mlp.__class__, mlp.snip_swiglu = SnipMLP, stock
        mlp.linear_fc1.snip.state.beside_swiglu = mlp.linear_fc2.snip.state.beside_swiglu = True
    return f"SwiGLU of {len(mlps)} layers"


def why_no_swiglu(config: Any) -> str | None:
    """Return why not exactly Megatron's fused SwiGLU runs between two linears. None if it does."""
    for other, why in (
        (config.activation_func is not functional.silu or not config.gated_linear_unit, "the activation is not SwiGLU"),
        (config.add_bias_linear, "linears have a bias: --disable-bias-linear"),
        (not config.bias_activation_fusion, "--no-bias-swiglu-fusion"),
        (config.use_te_activation_func, "--use-te-activation-func"),
        (config.activation_func_fp8_input_store, "--activation-func-fp8-input-store"),
        (config.cpu_offloading, "--cpu-offloading-num-layers"),
    ):
        if other:
            return why
    return None
