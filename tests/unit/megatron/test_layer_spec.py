"""The layer for Transformer Engine; what it needs of Megatron can be checked without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from snip_megatron.errors import SnipError
from snip_megatron.megatron.conversion import _SNIP_CLASS
from snip_megatron.megatron.layer_spec import _KEYS, transformer_engine_layer_spec


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
