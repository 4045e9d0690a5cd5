"""Megatron's arguments of a run of several ranks, for tests of what they cost."""

import argparse
from typing import Any

# A Llama of 8 blocks on 2 × 2 × 2 ranks, 4 microbatches a rank.
ARGUMENTS: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "group_query_attention": True,
    "num_query_groups": 4, "kv_channels": 64, "ffn_hidden_size": 4096, "swiglu": True, "seq_length": 2048,
    "micro_batch_size": 2, "global_batch_size": 16, "data_parallel_size": 2, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None, "sequence_parallel": True,
    "context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None,
    "padded_vocab_size": 32000, "untie_embeddings_and_output_weights": True, "use_distributed_optimizer": True,
    "overlap_grad_reduce": False, "overlap_param_gather": False, "account_for_embedding_in_pipeline_split": False,
    "moe_grouped_gemm": False, "transformer_impl": "transformer_engine",
    "gradient_accumulation_fusion": True, "accumulate_allreduce_grads_in_fp32": True,
    "account_for_loss_in_pipeline_split": False, "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, "recompute_modules": None,
}  # fmt: skip
WANTED = {"enabled": True, "budget": "speedup=1.2", "formats": ("bf16", "fp8", "fp8_tensor")}


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**ARGUMENTS, **given})
