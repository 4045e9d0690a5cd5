"""The linears of models of Transformer Engine's layers, built on the meta device."""

import pytest
import torch  # noqa: F401  Transformer Engine needs torch's libraries

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from megatron.core.transformer.transformer_config import MLATransformerConfig
from meta_models import on_meta, rows_of

from snip_megatron.precision import Role, Side


def test_latent_attention_and_the_layer_of_another_token() -> None:
    result = on_meta(
        MLATransformerConfig, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
        multi_latent_attention=True, qk_layernorm=True, num_query_groups=4, mtp_num_layers=1, rope_type="rope",
        transformer_impl="transformer_engine",
    )  # fmt: skip
    everything = (*result.covered, *result.uncovered)
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


def test_what_sparse_attention_absorbs_stays_bf16() -> None:
    """Attention multiplies by parts of the weight, and never calls the linear."""
    result = on_meta(
        MLATransformerConfig, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
        multi_latent_attention=True, num_query_groups=4, rope_type="rope", transformer_impl="transformer_engine",
        experimental_attention_variant="dsa", dsa_indexer_n_heads=2, dsa_indexer_head_dim=16, dsa_indexer_topk=8,
        dsa_indexer_loss_coeff=0.01,
    )  # fmt: skip
    assert {row.id.path for row in result.uncovered} == {"self_attention.linear_kv_up_proj"}
    assert "self_attention.core_attention.indexer.linear_wq_b" in rows_of(result.covered, 0)


def test_mixers_latent_experts_and_attention_of_a_hybrid() -> None:
    """Mamba's kernels need a GPU and a package, which a model on the meta device does not."""
    result = on_meta(
        pattern="ME*-", num_layers=4, mamba_head_dim=16, mamba_num_heads=4, mamba_state_dim=8, mamba_num_groups=2,
        num_moe_experts=4, moe_router_topk=2, moe_grouped_gemm=True, moe_ffn_hidden_size=48, moe_latent_size=32,
        moe_shared_expert_intermediate_size=80, tensor_model_parallel_size=2, sequence_parallel=True,
        gated_linear_unit=False, transformer_impl="transformer_engine", is_hybrid_model=True,
    )  # fmt: skip
    assert result.uncovered == ()
    mixer, experts = rows_of(result.covered, 0), rows_of(result.covered, 1)
    # z and x have 64 features each, B and C 2 groups of 8 states, dt one feature a head.
    assert {path: (row.n, row.k, row.role) for path, row in mixer.items()} == {
        "mixer.in_proj": (2 * 64 + 2 * 16 + 4, 64, Role.READS),
        "mixer.out_proj": (64, 64, Role.WRITES),
    }
    assert {path: (row.n, row.k, row.role, row.active) for path, row in experts.items()} == {
        "mlp.fc1_latent_proj": (32, 64, Role.READS, 1),
        "mlp.experts.linear_fc1": (48, 32, Role.BETWEEN, 2),
        "mlp.experts.linear_fc2": (32, 48, Role.BETWEEN, 2),
        "mlp.shared_experts.linear_fc1": (80, 64, Role.READS, 1),
        "mlp.shared_experts.linear_fc2": (64, 80, Role.WRITES, 1),
        "mlp.fc2_latent_proj": (64, 32, Role.WRITES, 1),
    }
    assert set(rows_of(result.covered, 2)) == {"self_attention.linear_qkv", "self_attention.linear_proj"}
    assert set(rows_of(result.covered, 3)) == {"mlp.linear_fc1", "mlp.linear_fc2"}


def test_gated_delta_nets_stand_beside_gated_attention() -> None:
    result = on_meta(
        experimental_attention_variant="gated_delta_net", linear_attention_freq=4, linear_conv_kernel_dim=4,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        attention_output_gate=True, transformer_impl="transformer_engine",
    )  # fmt: skip
    assert result.uncovered == ()
    delta, attention = rows_of(result.covered, 0), rows_of(result.covered, 3)
    assert (delta["self_attention.in_proj"].n, delta["self_attention.out_proj"].k) == (2 * 32 + 2 * 64 + 2 * 4, 64)
    assert attention["self_attention.linear_qkv"].n == 2 * 64 + 2 * 32  # queries and their gates, keys and values
