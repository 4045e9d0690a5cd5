"""The decoder layer under ``--transformer-impl transformer_engine``.

It combines norm and attention of Transformer Engine with Megatron's own linears, because the GEMMs inside Transformer
Engine's fused norm-and-linear cannot be replaced. The spec starts from Megatron's local layer, which keeps norm and
linear apart as well, and whose map of checkpoint keys lets both layouts share checkpoints.

The parameters have the order of the stock layer. Under ``dp_reshardable``, its default, Megatron's distributed
optimizer saves its state by position in this order and without names. In another order, a checkpoint of stock Megatron
would load every FP32 master weight and moment into another parameter, and no error would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from snip_megatron.errors import SnipError

_KEYS = ("input_layernorm.", "pre_mlp_layernorm.")
_LINEAR = "linear_qkv"
"""The linear of an attention into which the stock layer fuses the input norm."""


class SeparateNormLayer(TransformerLayer):  # type: ignore[misc]
    """A decoder layer whose norms are modules, with its parameters in the order of the layer that fuses them."""

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Iterate over the modules as torch does, but over the input norm before the linear that stock fuses it into.

        In the stock layer that linear comes after the projection of the attention's output. The other norm stands
        before its linear in any case.
        """
        found = list(super().named_modules(memo, prefix, remove_duplicate))
        modules = [module for _, module in found]
        norm, linear = self._modules.get("input_layernorm"), getattr(self._modules.get("self_attention"), _LINEAR, None)
        if norm in modules and linear in modules:
            moved = found.pop(modules.index(norm))
            modules.remove(norm)
            found.insert(modules.index(linear), moved)
        yield from found


def transformer_engine_layer_spec(model_config: Any) -> ModuleSpec:
    """Return the spec of a dense decoder layer whose linears can be converted.

    Args:
        model_config: Megatron's GPTModelConfig, the argument of its ``transformer_layer_spec`` callable.

    Raises:
        SnipError: If Transformer Engine is not installed or is to compute the activation, or if Megatron's layer no
            longer maps its checkpoint keys.
    """
    if not HAVE_TE:
        raise SnipError(
            "--transformer-impl transformer_engine needs Transformer Engine, which cannot be imported here;"
            " use --transformer-impl local"
        )
    # These classes subclass Transformer Engine's and can only be imported if it is installed.
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

    config = model_config.transformer
    if getattr(config, "use_te_activation_func", False):
        raise SnipError(
            "--use-te-activation-func cannot be combined with --snip under --transformer-impl transformer_engine:"
            " SNIP's layer has Megatron's activation; leave it out"
        )
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    spec.module = SeparateNormLayer
    layer = spec.submodules
    missing = [key for key in _KEYS if key not in layer.sharded_state_dict_keys_map]
    if missing:
        raise SnipError(f"Megatron's layer does not map {missing[0]}: its checkpoints would not fit stock ones")
    layer.input_layernorm = layer.pre_mlp_layernorm = partial(_norm_without_state, TENorm)
    attention = layer.self_attention.submodules
    attention.core_attention = TEDotProductAttention
    if config.qk_layernorm and not config.qk_l2_norm:  # with both, Megatron's spec has the L2 norm
        attention.q_layernorm = TENorm
        attention.k_layernorm = TENorm
    return spec


def _norm_without_state(build: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Build Transformer Engine's norm without the extra state that its modules add to checkpoints.

    A fused norm-and-linear has one extra state, saved under the linear's key. An extra state of the norm would be a key
    that stock checkpoints lack and stock models do not expect. It holds recipes of quantisation, which a norm does not
    use.
    """
    norm = build(*args, **kwargs)
    stock: Any = type(norm)
    norm.__class__ = _stateless(stock)
    return norm


@cache  # one class for all norms
def _stateless(stock: Any) -> Any:
    """Return a class of norms without extra state."""
    members: dict[str, Any] = {name: getattr(torch.nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    return type(stock.__name__, (stock,), members | {"__module__": __name__})
