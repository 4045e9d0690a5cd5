"""Megatron's arguments of a run of several ranks, for tests of what they cost."""

import argparse
from typing import Any

import llama_arguments

# A Llama of 8 blocks on 2 × 2 × 2 ranks, 4 microbatches a rank.
ARGUMENTS: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4, "kv_channels": 64,
    "ffn_hidden_size": 4096, "seq_length": 2048, "micro_batch_size": 2, "global_batch_size": 16,
    "data_parallel_size": 2, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
    "sequence_parallel": True, "padded_vocab_size": 32000, "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
}  # fmt: skip
WANTED = {"enabled": True, "budget": "speedup=1.2", "formats": ("bf16", "fp8", "fp8_tensor")}


def arguments(**given: Any) -> argparse.Namespace:
    return llama_arguments.arguments(**{**ARGUMENTS, **given})
