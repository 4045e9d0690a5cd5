"""The linears of models of Transformer Engine's layers, built on the meta device."""

from __future__ import annotations

import pytest
import torch  # noqa: F401  Transformer Engine needs torch's libraries

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from megatron.core.transformer.transformer_config import MLATransformerConfig
from meta_models import on_meta, rows_of

from snip_megatron.precision import Role, Side


def test_latent_attention_and_the_layer_of_another_token() -> None:
    found = on_meta(
        MLATransformerConfig, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
        multi_latent_attention=True, qk_layernorm=True, num_query_groups=4, mtp_num_layers=1, rope_type="rope",
        transformer_impl="transformer_engine",
    )  # fmt: skip
    everything = (*found.covered, *found.left)
    attention = rows_of(everything, 0)
    assert {path: row.role for path, row in attention.items() if "_down_" in path} == {
        "self_attention.linear_q_down_proj": Role.READS,
        "self_attention.linear_kv_down_proj": Role.READS,
    }
    up = attention["self_attention.linear_kv_up_proj"]
    assert (up.role, up.sharded, up.n, up.k) == (Role.BETWEEN, Side.OUTPUT, 4 * 32, 16)
    ahead = rows_of(everything, 0, "mtp")
    assert (ahead["eh_proj"].n, ahead["eh_proj"].k, ahead["eh_proj"].role) == (64, 128, Role.READS)
    # Boundary 8 is the end of the decoder; the layer of another token has a stream of its own from 9 on.
    assert [row.sub_block for row in ahead.values() if row.role is Role.WRITES] == [10, 11]
    assert ahead["eh_proj"].sub_block == 9


def test_grouped_experts_have_one_row() -> None:
    found = on_meta(
        num_moe_experts=8, moe_router_topk=2, moe_grouped_gemm=True, moe_ffn_hidden_size=48, add_bias_linear=False,
        expert_model_parallel_size=4, transformer_impl="transformer_engine", tensor_model_parallel_size=2,
    )  # fmt: skip
    second = rows_of((*found.covered, *found.left), 1)["mlp.experts.linear_fc2"]
    assert (second.n, second.k, second.experts, second.active, second.role) == (64, 48, 8, 2, Role.WRITES)
