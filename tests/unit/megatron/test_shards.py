"""Layouts that cut quantisation tiles where others do not."""

import argparse
from typing import Any

import llama_arguments
import pytest
from llama_arguments import linears

from snip_megatron.megatron.validate import cut_tiles

SIZES: dict[str, Any] = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4, "kv_channels": 64, "ffn_hidden_size": 1536,
    "seq_length": 256, "micro_batch_size": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 384}


def arguments(tp: int, **given: Any) -> argparse.Namespace:
    return llama_arguments.arguments(**SIZES | {"tensor_model_parallel_size": tp} | given)


@pytest.mark.parametrize(
    ("tp", "given", "cut"),
    [
        (1, {"ffn_hidden_size": 100}, []),  # one shard is what every other layout is held against
        (2, {}, []),
        (4, {"sequence_parallel": True}, ["tokens of a microbatch 256 / 4 ranks = 64"]),
        (1, {"context_parallel_size": 2}, ["tokens of a microbatch's pieces 128 / 2 ranks = 64"]),
        (
            4,
            {"seq_length": 512, "context_parallel_size": 2, "sequence_parallel": True},
            ["tokens of a microbatch 512 / 8 ranks = 64"],
        ),
        (2, {"ffn_hidden_size": 1408}, ["columns of mlp.linear_fc2 1408 / 2 ranks = 704"]),
        (4, {"kv_channels": 32}, ["rows of self_attention.linear_qkv 768 / 4 ranks = 192"]),
        (
            2,
            {"num_query_groups": 3, "num_attention_heads": 9},
            [
                "rows of self_attention.linear_qkv 960 / 2 ranks = 480",
                "columns of self_attention.linear_proj 576 / 2 ranks = 288",
            ],
        ),
        (2, EXPERTS | {"ffn_hidden_size": 1408}, []),  # no layer is dense
        (2, EXPERTS | {"expert_tensor_parallel_size": 2}, ["columns of mlp.experts.linear_fc2 384 / 2 ranks = 192"]),
    ],
)
def test_what_is_cut(tp: int, given: dict[str, Any], cut: list[str]) -> None:
    args = arguments(tp, **given)
    assert cut_tiles(args, linears(args)) == cut
