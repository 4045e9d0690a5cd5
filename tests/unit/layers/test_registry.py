"""The registry: adopting maps, refusing those of other models, counters of a step."""

from dataclasses import replace

import pytest
from dense_names import dense_names
from handles import handle_of

from snip_megatron.layers.context import StepContext
from snip_megatron.layers.registry import LinearRegistry, describe_left_out
from snip_megatron.precision import ALL_BF16, Format, Gemm, LinearId, LinearRow, PrecisionMap, option_id
from snip_megatron.precision.errors import SnipError

NAMES = dense_names(3)


def registry_of(*linears: LinearId) -> LinearRegistry:
    registry = LinearRegistry([LinearRow(name, 0, 1, 1) for name in NAMES], StepContext())
    for linear in linears:
        registry.add(handle_of(linear, context=registry.context))
    return registry


def test_the_index_of_a_linear_is_its_place_among_all() -> None:
    """It is part of the key of stochastic rounding: distinct, and the same on every pipeline stage."""
    assert [each.index for each in registry_of(*map(LinearId.parse, reversed(NAMES)))] == list(range(12))


def test_one_decision_for_all_experts_and_a_number_for_each() -> None:
    linear = LinearId("decoder", 1, "mlp.experts.linear_fc1")
    context = StepContext(dp_size=4, dp_rank=3, expert_dp_size=2, expert_dp_rank=1)
    registry = LinearRegistry([LinearRow(str(linear), 0, 4, 4, experts=4, active=2)], context)
    for number in (3, 2):
        handle = replace(handle_of(linear, context=registry.context), expert=number)
        registry.add(handle)
    registry.adopt(PrecisionMap(choices={str(linear): Format.FP4}))
    assert [h.expert for h in registry] == [2, 3]
    assert all(h.formats == (Format.FP4,) * 3 for h in registry)
    dense = handle_of(LinearId("decoder", 1, "mlp.linear_fc1"), context=registry.context)
    assert len({h.index for h in [*registry, dense]}) == 3
    assert [h.global_microbatch(5) for h in (handle, dense)] == [5 * 2 + 1, 5 * 4 + 3]


def test_adopt_sets_all_three_formats_of_every_local_linear() -> None:
    first, second = LinearId("decoder", 1, "mlp.linear_fc2"), LinearId("decoder", 1, "mlp.linear_fc1")
    registry = registry_of(first, second)
    choices = dict(PrecisionMap.uniform(NAMES, Format.FP8).choices)
    choices[option_id(str(first), Gemm.DGRAD)] = Format.FP4
    choices[option_id(str(first), Gemm.WGRAD)] = Format.BF16
    new = PrecisionMap(choices=choices, version=4)
    registry.adopt(new)
    assert registry[str(first)].formats == (Format.FP8, Format.FP4, Format.BF16)
    assert registry[str(second)].formats == (Format.FP8, Format.FP8, Format.FP8)
    assert registry.current is new
    assert registry.context.map_is_quantized
    assert [h.id for h in registry] == [second, first]
    assert len(registry) == 2
    registry.adopt(PrecisionMap(choices={}))
    assert registry[str(first)].formats == ALL_BF16
    assert not registry.context.map_is_quantized


def test_adopt_refuses_an_unknown_linear_and_changes_nothing() -> None:
    linear = LinearId("decoder", 0, "mlp.linear_fc1")
    registry = registry_of(linear)
    before = registry.current
    bad = {str(linear): Format.FP4, "decoder.layers.3.mlp.linear_fc1": Format.FP4}
    with pytest.raises(SnipError, match=r"map 9 names decoder\.layers\.3\.mlp\.linear_fc1"):
        registry.adopt(PrecisionMap(choices=bad, version=9))
    assert registry.current is before
    assert registry[str(linear)].formats == ALL_BF16


def test_gemms_that_a_map_leaves_out_are_counted() -> None:
    whole = dict.fromkeys(NAMES[1:], Format.FP8)
    assert describe_left_out(PrecisionMap({**whole, NAMES[0]: Format.FP8}), NAMES) is None
    line = describe_left_out(PrecisionMap({**whole, f"{NAMES[0]}:fprop": Format.FP8}), NAMES)
    assert line == (f"the map names no format for 2 of 36 GEMMs, which run in bf16: {NAMES[0]}:dgrad, {NAMES[0]}:wgrad")
