"""The decoder layer for ``--transformer-impl transformer_engine``: its norm and attention, Megatron's own linears.

Transformer Engine's fused norm-and-linear cannot run our GEMMs. This layer keeps norm and linear apart; Megatron's
layer without Transformer Engine does as well, together with the key map that makes the two layouts share checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from snip_megatron.errors import SnipError

_KEYS = ("input_layernorm.", "pre_mlp_layernorm.")


def transformer_engine_layer_spec(model_config: Any) -> ModuleSpec:
    """Spec of a dense decoder layer whose linears :func:`snip_megatron.layers.convert_model` can convert.

    Args:
        model_config: Megatron's GPTModelConfig, as its ``transformer_layer_spec`` callable gets it.

    Raises:
        SnipError: Transformer Engine is not installed, or Megatron's layer no longer maps its checkpoint keys.
    """
    if not HAVE_TE:
        raise SnipError(
            "--transformer-impl transformer_engine needs Transformer Engine, which cannot be imported here;"
            " use --transformer-impl local"
        )
    # Its classes subclass Transformer Engine's: they can only be imported where that is installed.
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

    config = model_config.transformer
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer = spec.submodules
    missing = [key for key in _KEYS if key not in layer.sharded_state_dict_keys_map]
    if missing:
        raise SnipError(f"Megatron's layer does not map {missing[0]}: its checkpoints would not fit stock ones")
    layer.input_layernorm = layer.pre_mlp_layernorm = partial(_norm_without_state, TENorm)
    attention = layer.self_attention.submodules
    attention.core_attention = TEDotProductAttention
    if config.qk_layernorm:
        attention.q_layernorm = TENorm
        attention.k_layernorm = TENorm
    return spec


def _norm_without_state(build: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Transformer Engine's norm, less the extra state its modules add to checkpoints.

    A fused norm-and-linear has one extra state, which the linear's stands for; the norm's own would be a key that stock
    checkpoints lack and stock models do not expect. It holds recipes of quantised operations, which a norm has none of.
    """
    norm = build(*args, **kwargs)
    stateless = {name: getattr(torch.nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    norm.__class__ = type(type(norm).__name__, (type(norm),), stateless)
    return norm
