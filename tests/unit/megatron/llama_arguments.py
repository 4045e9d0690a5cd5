"""Megatron's arguments of a Llama of 4 layers on one rank: the defaults of its parser, and what its validation adds."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.training.arguments import add_megatron_arguments

_DERIVED: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 96,
    "swiglu": True,
    "bf16": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "virtual_pipeline_model_parallel_size": None,
    "gtp_weight_remat_size": 1,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_layer_freq": [0, 1, 1, 0],
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "transformer_impl": "local",
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_shared_expert_intermediate_size": 96,
    "seq_length": 32,
    "global_batch_size": 8,
}


def megatron_parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


DEFAULTS = vars(megatron_parser().parse_args([]))


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**DEFAULTS, **_DERIVED, **given})
