"""Which layers are mixtures of experts, from arguments and from a model's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from snip_megatron.errors import SnipError
from snip_megatron.layers.experts import ExpertLayers

FIELDS: dict[str, Any] = {
    "num_layers": 5,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "ffn_hidden_size": 96,
    "moe_shared_expert_intermediate_size": None,
}


def experts(**given: Any) -> ExpertLayers | None:
    return ExpertLayers.of(SimpleNamespace(**{**FIELDS, **given}))


def test_a_dense_decoder_has_none() -> None:
    assert experts() is None
    assert experts(num_experts=None, num_moe_experts=None) is None


def test_arguments_and_configuration_say_the_same() -> None:
    assert experts(num_experts=8) == experts(num_moe_experts=8) == ExpertLayers(frozenset(range(5)), 8, 2, 96)


@pytest.mark.parametrize(("pattern", "layers"), [(1, {0, 1, 2, 3, 4}), (2, {0, 2, 4}), ([0, 1, 1, 0, 1], {1, 2, 4})])
def test_layers_follow_the_pattern(pattern: Any, layers: set[int]) -> None:
    found = experts(num_experts=8, moe_layer_freq=pattern)
    assert found is not None
    assert found.layers == layers


def test_a_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(SnipError, match="names 2 layers, the decoder has 5"):
        experts(num_experts=8, moe_layer_freq=[0, 1])
    with pytest.raises(SnipError, match="--moe-layer-freq 0: give 1 or more"):
        experts(num_experts=8, moe_layer_freq=0)


def test_elements_are_those_that_a_token_meets() -> None:
    """Two of eight experts of hidden size 32 and a shared one of 48, each with fc1 (gate and up) and fc2."""
    sizes = {"num_experts": 8, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 48}
    found = experts(**sizes)
    assert found is not None
    assert found.bf16_elements(64, gated=True) == 48 * 64 * 3  # the others are candidates
    assert found.bf16_elements(64, gated=False) == 48 * 64 * 2
    assert found.mixture == (8, 2)
