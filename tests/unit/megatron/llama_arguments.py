"""Megatron's arguments of a Llama, the defaults of its parser with what its validation adds, and SNIP's check of them.

``arguments`` are of 4 layers on one rank, ``run_arguments`` of 8 on 2 × 2 × 2 ranks with 4 microbatches each.
"""

import argparse
from typing import Any

from megatron.training.arguments import add_megatron_arguments
from refusal import refusal

from snip_megatron.megatron import validate
from snip_megatron.megatron.model_linears import ModelLinears
from snip_megatron.precision import LinearRow
from snip_megatron.runtime.config import SnipConfig

_DERIVED: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2,
    "kv_channels": 16, "ffn_hidden_size": 96, "swiglu": True, "bf16": True, "accumulate_allreduce_grads_in_fp32": True,
    "virtual_pipeline_model_parallel_size": None, "gtp_weight_remat_size": 1, "expert_gtp_weight_remat_size": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_layer_freq": [0, 1, 1, 0], "moe_router_topk": 2, "moe_ffn_hidden_size": 48,
    "transformer_impl": "local", "moe_router_load_balancing_type": ["aux_loss"],
    "moe_shared_expert_intermediate_size": 96, "seq_length": 32, "global_batch_size": 8,
}  # fmt: skip

_RUN: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4, "kv_channels": 64,
    "ffn_hidden_size": 4096, "seq_length": 2048, "micro_batch_size": 2, "global_batch_size": 16,
    "data_parallel_size": 2, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
    "sequence_parallel": True, "padded_vocab_size": 32000, "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
}  # fmt: skip
FIELDS = {"enabled": True, "budget": "speedup=1.2", "formats": ("bf16", "fp8", "fp8_tensor")}


def linears(args: argparse.Namespace) -> ModelLinears:
    """The linears of a Llama of these arguments, evenly split over pipeline stages; some may be mixtures of experts."""
    heads, groups = args.num_attention_heads, args.num_query_groups if args.group_query_attention else 0
    shapes = {
        "self_attention.linear_qkv": ((heads + 2 * (groups or heads)) * args.kv_channels, args.hidden_size),
        "self_attention.linear_proj": (args.hidden_size, heads * args.kv_channels),
    }
    rows = []
    for layer in range(args.num_layers):
        experts = getattr(args, "num_experts", None)
        if experts and not isinstance(args.moe_layer_freq, int):
            experts *= args.moe_layer_freq[layer]
        prefixes = {"mlp.": args.ffn_hidden_size}
        if experts:
            prefixes = {"mlp.experts.": args.moe_ffn_hidden_size}
            if args.moe_shared_expert_intermediate_size:
                prefixes["mlp.shared_experts."] = args.moe_shared_expert_intermediate_size
        mlp = {}
        for prefix, ffn in prefixes.items():
            mlp[f"{prefix}linear_fc1"] = (2 * ffn, args.hidden_size)
            mlp[f"{prefix}linear_fc2"] = (args.hidden_size, ffn)
        stage = layer * args.pipeline_model_parallel_size // args.num_layers
        for path, shape in (shapes | mlp).items():
            mixture = (args.num_experts, args.moe_router_topk) if ".experts." in path else (1, 1)
            rows.append(LinearRow(f"decoder.layers.{layer}.{path}", stage, *shape, *mixture))
    return ModelLinears.split(rows, {})


def megatron_parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


DEFAULTS = vars(megatron_parser().parse_args([]))


def arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**DEFAULTS, **_DERIVED, **changes})


def run_arguments(**changes: Any) -> argparse.Namespace:
    return arguments(**_RUN | changes)


def check(snip: SnipConfig, args: argparse.Namespace) -> None:
    """Check the arguments, and the model that they ask for."""
    validate.check(snip, args)
    validate.check_model(snip, args, linears(args))


def refused(snip: SnipConfig, args: argparse.Namespace) -> str:
    return refusal(check, snip, args)
