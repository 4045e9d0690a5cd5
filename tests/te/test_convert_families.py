"""Conversion of Transformer Engine's linears in the attention, mixers and experts that people train beside dense ones.

Everything but the linears runs by torch: attention's core, and the kernels of gated delta nets and Mamba.
"""

import contextlib
import json
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.ssm.gated_delta_net import common
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from te_models import DENSE, counting, seeming_cuda, trained, with_torch_norms
from torch.nn import functional
from torch_attention import TorchAttention

from snip_megatron.layers import LinearRegistry
from snip_megatron.megatron import convert_model
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_head_dim": 16, "v_head_dim": 16,
    "qk_pos_emb_head_dim": 8, "rope_type": "rope", "qk_layernorm": True, "num_query_groups": 4,
}  # fmt: skip
BLOCKS = [
    {
        "attention": {"replace_with_linear": linear, "num_query_groups": None if linear else 2},
        "mlp": {"ffn_hidden_size": 96},
    }
    for linear in (True, False)
]
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "latent attention": (
        LATENT,
        {f"self_attention.linear_{part}" for part in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")},
    ),
    "gated attention": ({"attention_output_gate": True}, {"self_attention.linear_qkv", "self_attention.linear_proj"}),
    "latent experts beside a shared one": (
        {**EXPERTS, "moe_latent_size": 32, "moe_shared_expert_intermediate_size": 48},
        {f"mlp.{part}" for part in ("fc1_latent_proj", "fc2_latent_proj", "experts.linear_fc1")},
    ),
    "a shared expert with a gate": (
        {**EXPERTS, "moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
        {"mlp.shared_experts.linear_fc1", "mlp.experts.linear_fc2"},
    ),
    "tokens dropped at a capacity": (
        {**EXPERTS, "moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "aux_loss"},
        {"mlp.experts.linear_fc1"},
    ),
    "experts padded to a capacity": (
        {**EXPERTS, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"mlp.experts.linear_fc1"},
    ),
    "gated delta nets": (
        {
            "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2, "deterministic_mode": True,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
        {"self_attention.in_proj", "self_attention.out_proj"},
    ),
    "a linear in place of attention": (
        {"heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": BLOCKS})},
        {"self_attention", "mlp.linear_fc1"},
    ),
}  # fmt: skip
"""Name → fields of the configuration, and some paths in its first layer."""


KINDS = {
    "multi_latent_attention": MLATransformerConfig,
    "heterogeneous_layers_config_encoded_json": HeterogeneousTransformerConfig,
}


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: "cpu")
    monkeypatch.setattr("torch.cuda.current_stream", mock.MagicMock())
    monkeypatch.setattr("torch.cuda.Stream", mock.MagicMock())
    monkeypatch.setattr("megatron.core.transformer.moe.moe_utils.te_general_gemm", None)  # needs CUDA
    monkeypatch.setattr(common, "HAVE_FLA", True)
    monkeypatch.setattr(common, "get_cuda_rng_tracker", lambda: mock.Mock(fork=contextlib.nullcontext))
    monkeypatch.setattr(common, "l2norm", lambda x, **_: functional.normalize(x, dim=-1, eps=1e-6))


def built(fields: dict[str, Any]) -> GPTModel:
    torch.manual_seed(0)
    kind = next((kind for name, kind in KINDS.items() if name in fields), TransformerConfig)
    config = kind(**{**DENSE, "transformer_impl": "transformer_engine", **fields})
    with seeming_cuda():
        if config.experimental_attention_variant is not None:
            spec: Any = get_transformer_block_with_experimental_attention_variant_spec(config)
        elif kind is HeterogeneousTransformerConfig:
            spec = get_gpt_heterogeneous_layer_spec(config, use_te=True)
        else:
            spec = get_gpt_layer_with_transformer_engine_spec(
                num_experts=config.num_moe_experts,
                moe_grouped_gemm=config.moe_grouped_gemm,
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=config.multi_latent_attention,
            )
        for layer in getattr(spec, "layer_specs", [spec]):
            parts = getattr(layer.submodules.self_attention, "submodules", None)
            if hasattr(parts, "core_attention"):
                parts.core_attention = TorchAttention
        model = GPTModel(config, spec, 128, 32, position_embedding_type="rope")
    return with_torch_norms(model)


def adopted(chunk: GPTModel, fmt: Format) -> LinearRegistry:
    registry = convert_model([chunk], SnipConfig(enabled=True, seed=99))
    registry.adopt(PrecisionMap.uniform(registry.names, fmt))
    return registry


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_under_a_map(name: str) -> None:
    fields, paths = FAMILIES[name]
    chunk = built(fields)
    keys = list(chunk.state_dict())
    registry = adopted(chunk, Format.FP8)
    assert not registry.stock
    assert {f"decoder.layers.0.{path}" for path in paths} <= set(registry.names)
    assert list(chunk.state_dict()) == keys
    tokens = counting()
    losses = trained(chunk, registry, tokens, (tokens + 3) % 128, steps=10)
    assert losses[-1] < losses[0] - 0.5
    missing = [name for name, parameter in chunk.named_parameters() if parameter.grad is None]
    assert missing == []
