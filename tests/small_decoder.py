"""The sizes of a small dense decoder, as arguments of Megatron's TransformerConfig."""

from typing import Any

import torch

DENSE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "use_cpu_initialization": True,
}
