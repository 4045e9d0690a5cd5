"""A small dense decoder of Megatron: its sizes as arguments of TransformerConfig, and a model of local layers."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

DENSE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96,
    "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
    "normalization": "RMSNorm", "use_cpu_initialization": True,
}  # fmt: skip


def dense(attention: type | None = None, position: str = "rope", **changes: Any) -> GPTModel:
    """A vocabulary of 128 and 32 positions at most; ``attention`` takes the place of Megatron's core attention."""
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention
    return GPTModel(TransformerConfig(**DENSE | changes), spec, 128, 32, position_embedding_type=position)


def identity(chunk: GPTModel) -> tuple[object, ...]:
    """What conversion leaves as it is: the parameters themselves, keys of the state, and the layout of checkpoints."""
    layout = {name: (v.key, getattr(v, "global_shape", None)) for name, v in chunk.sharded_state_dict().items()}
    return [(name, id(parameter)) for name, parameter in chunk.named_parameters()], list(chunk.state_dict()), layout
