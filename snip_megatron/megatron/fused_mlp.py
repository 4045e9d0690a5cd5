"""Megatron's MLP with SwiGLU fused into the quantisation of its result and of its gradient (``--snip-fusions``).

Like linears, instances are made by assigning the class of a built module. Parameters and checkpoints do not change.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back
from megatron.core.transformer.mlp import MLP
from torch.nn import functional

from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.swiglu import SwiGLU, fused_swiglu, may_fuse
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.precision import Format

STOCK = SwiGLU(swiglu, swiglu_back)
"""Megatron's functions, which it compiles unless ``--disable-jit-fuser`` is given."""


class SnipMLP(MLP):  # type: ignore[misc]
    """An MLP of two converted linears that quantises SwiGLU where it is computed."""

    snip_swiglu: SwiGLU

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run Megatron's own code if a probe or a measuring pass runs, or if the map keeps both linears in bf16."""
        fc1, fc2 = self.linear_fc1.snip, self.linear_fc2.snip
        asked = (per_token_scale, *kwargs.values())  # a layer passes padding_mask=None
        if any(each is not None for each in asked) or not may_fuse(fc1, fc2):
            return super().forward(hidden_states, per_token_scale, **kwargs)  # type: ignore[no-any-return]
        y, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(fused_swiglu(y, fc1, fc2, self.snip_swiglu))  # type: ignore[no-any-return]


def fuse_swiglu(layers: Sequence[torch.nn.Module], backend: GemmBackend, stock: SwiGLU = STOCK) -> str:
    """Fuse SwiGLU in the dense MLPs of ``layers``, and return a phrase for the log.

    ``stock`` are the functions that the MLPs use where nothing is fused.
    """
    mlps: list[Any] = [layer.mlp for layer in layers if _is_converted(layer.mlp)]
    reason = _why_not(mlps, backend)
    if reason is None:
        for mlp in mlps:
            mlp.__class__, mlp.snip_swiglu = SnipMLP, stock
            mlp.linear_fc1.snip.state.beside_swiglu = mlp.linear_fc2.snip.state.beside_swiglu = True
    return f"SwiGLU of {len(mlps)} layers" if reason is None else f"no SwiGLU ({reason})"


def _is_converted(mlp: Any) -> bool:
    return type(mlp) in (MLP, SnipMLP) and all(
        isinstance(getattr(linear, "snip", None), LinearHandle) for linear in (mlp.linear_fc1, mlp.linear_fc2)
    )


def _why_not(mlps: Sequence[Any], backend: GemmBackend) -> str | None:
    if not mlps:
        return "this rank has no dense MLP of two quantised linears"
    config = mlps[0].config
    if (why := why_no_swiglu(config)) is not None:
        return why
    y = torch.empty(2, 2 * mlps[0].linear_fc2.weight.shape[1], dtype=config.params_dtype, device="meta")
    if backend.swiglu_kernel(y, (Format.FP8, Format.FP8)) is None:
        return (
            f"the {backend.name} GEMMs have no kernel for {config.params_dtype} and {y.shape[1] // 2} features a rank"
        )
    return None


def why_no_swiglu(config: Any) -> str | None:
    """Return why something else than Megatron's fused SwiGLU runs between two linears, or None."""
    for hindered, why in (
        (config.activation_func is not functional.silu or not config.gated_linear_unit, "the activation is not SwiGLU"),
        (config.add_bias_linear, "linears have a bias: --disable-bias-linear"),
        (not config.bias_activation_fusion, "--no-bias-swiglu-fusion"),
        (getattr(config, "use_te_activation_func", False), "--use-te-activation-func"),
        (getattr(config, "activation_func_fp8_input_store", False), "--activation-func-fp8-input-store"),
        (config.cpu_offloading, "--cpu-offloading-num-layers"),
    ):
        if hindered:
            return why
    return None
