"""Megatron's configuration of blocks shaped like Llama-8B's, for the benchmarks of layers and probes."""

from __future__ import annotations

import argparse

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.transformer_config import TransformerConfig


def transformer_config(arguments: argparse.Namespace, *, fused_accumulation: bool) -> TransformerConfig:
    """Return the configuration of the blocks, with wgrad accumulated in the GEMM or by a kernel of its own."""
    return TransformerConfig(
        num_layers=arguments.blocks,
        hidden_size=arguments.hidden,
        ffn_hidden_size=arguments.ffn,
        num_attention_heads=arguments.heads,
        num_query_groups=arguments.groups,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=HAVE_TE,
        apply_rope_fusion=HAVE_TE,
        gradient_accumulation_fusion=fused_accumulation and HAVE_TE,
    )
