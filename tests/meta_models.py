"""Models that are built on the meta device."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.models.hybrid import HybridModelConfig

from snip_megatron.megatron.conversion import linears_on_meta
from snip_megatron.megatron.model_linears import ModelLinears
from snip_megatron.precision import LinearRow

_KINDS = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
SIZES: dict[str, Any] = {f"{kind}_parallel_size": 1 for kind in _KINDS} | {"virtual_pipeline_model_parallel_size": None}
LLAMA: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96,
    "gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm", "transformer_impl": "local",
}  # fmt: skip


def on_meta(
    config: type[TransformerConfig] = TransformerConfig, *, pattern: str | None = None, **changes: Any
) -> ModelLinears:
    """The linears of a Llama of these fields of its configuration; parallel sizes are among them.

    A pattern of layers makes a hybrid of it.
    """
    sizes = SIZES | {name: changes[name] for name in SIZES if name in changes}
    dtype = torch.bfloat16  # of what pipeline stages exchange
    transformer = config(**LLAMA | sizes | {"pipeline_dtype": dtype} | changes)
    if pattern is None:
        model: Any = GPTModelConfig(
            transformer=transformer, vocab_size=128, seq_length=32, position_embedding_type="rope"
        )
    else:
        model = HybridModelConfig(transformer=transformer, vocab_size=128, seq_length=32, hybrid_layer_pattern=pattern)
    linears = linears_on_meta(argparse.Namespace(**sizes), model)
    assert not dist.is_initialized()
    return linears


def rows_of(linears: tuple[LinearRow, ...], layer: int, stack: str = "decoder") -> dict[str, LinearRow]:
    return {row.id.path: row for row in linears if row.id.layer == layer and row.id.stack == stack}
