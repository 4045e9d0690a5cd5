"""The layer for Transformer Engine; what it needs of Megatron can be checked without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core.extensions import transformer_engine
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from snip_megatron.errors import SnipError
from snip_megatron.megatron import layer_spec
from snip_megatron.megatron.conversion import _SNIP_CLASS
from snip_megatron.megatron.layer_spec import _KEYS, SeparateNormLayer, transformer_engine_layer_spec


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed")
def test_without_transformer_engine_it_is_one_line() -> None:
    with pytest.raises(SnipError, match="use --transformer-impl local"):
        transformer_engine_layer_spec(SimpleNamespace())


def test_megatron_s_layer_can_be_converted_and_shares_checkpoint_keys() -> None:
    """Its linears are of the classes that conversion knows; its norms are saved where fused linears look for them."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.keywords["submodules"]
    for linear in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
        assert linear in _SNIP_CLASS
    assert layer.sharded_state_dict_keys_map == dict(
        zip(_KEYS, ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"), strict=True)
    )


@pytest.mark.usefixtures("model_parallel_of_one")
@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_parameters_have_the_order_of_the_layer_that_fuses_norm_and_linear(qk_layernorm: bool) -> None:
    """The distributed optimizer saves its state by position. Stock's fused modules own the norms' parameters."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, qk_layernorm=qk_layernorm
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm)
    spec.module = SeparateNormLayer
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32, position_embedding_type="rope")
    names = [name for name, _ in model.named_parameters()]
    modules = [
        "self_attention.linear_proj",
        "input_layernorm",
        "self_attention.linear_qkv",
        *(("self_attention.q_layernorm", "self_attention.k_layernorm") if qk_layernorm else ()),
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    ]
    for layer in (0, 1):
        prefix = f"decoder.layers.{layer}."
        found = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        assert found == [f"{module}.{which}" for module in modules for which in ("weight", "bias")]
    assert sorted(names) == sorted(name for name in model.state_dict() if not name.endswith("_extra_state"))


@pytest.fixture
def with_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the two classes of Transformer Engine that the layer names."""
    for name in ("TENorm", "TEDotProductAttention"):
        monkeypatch.setattr(transformer_engine, name, type(name, (), {}), raising=False)
    monkeypatch.setattr(layer_spec, "HAVE_TE", True)


@pytest.mark.usefixtures("with_stand_ins")
def test_an_activation_of_transformer_engine_is_refused() -> None:
    """Megatron's MLP would call the plain activation in its place, on both halves of a gated unit."""
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
    config.use_te_activation_func = True
    with pytest.raises(SnipError, match="--use-te-activation-func cannot be combined with --snip"):
        transformer_engine_layer_spec(SimpleNamespace(transformer=config))


@pytest.mark.usefixtures("with_stand_ins")
@pytest.mark.parametrize(("chosen", "norm"), [({}, "IdentityOp"), ({"qk_layernorm": True}, "TENorm")])
@pytest.mark.parametrize("l2", [False, True])
def test_queries_and_keys_are_normalised_as_in_the_stock_layer(chosen: dict[str, bool], norm: str, l2: bool) -> None:
    """Stock takes the L2 norm where both norms are asked for."""
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, qk_l2_norm=l2, **chosen)
    spec = transformer_engine_layer_spec(SimpleNamespace(transformer=config))
    attention = spec.submodules.self_attention.submodules
    for found in (attention.q_layernorm, attention.k_layernorm):
        assert found.__name__ == ("L2Norm" if l2 else norm)
