"""The decoder's linears by Megatron's arguments: names, shapes, stages and FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
from llama_arguments import arguments

from snip_megatron.layers.registry import decoder_linear_names
from snip_megatron.megatron.model_linears import gemm_flops, model_linears


def shapes(**given: Any) -> dict[str, tuple[int, int]]:
    return {row.id.kind: (row.n, row.k) for row in model_linears(arguments(**given))[:4]}


def test_shapes_follow_attention_and_mlp() -> None:
    assert shapes() == {
        "self_attention.linear_qkv": (128, 64),
        "self_attention.linear_proj": (64, 64),
        "mlp.linear_fc1": (192, 64),
        "mlp.linear_fc2": (64, 96),
    }
    ungrouped = shapes(group_query_attention=False, num_query_groups=1, swiglu=False, kv_channels=32)
    assert ungrouped["self_attention.linear_qkv"] == (384, 64)
    assert ungrouped["self_attention.linear_proj"] == (64, 128)
    assert ungrouped["mlp.linear_fc1"] == (96, 64)
    assert shapes(swiglu=False, quick_geglu=True) == shapes()
    gated = shapes(attention_output_gate=True)
    assert gated["self_attention.linear_qkv"] == (192, 64)
    assert gated["self_attention.linear_proj"] == (64, 64)


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "expected"),
    [
        (4, 1, None, [0, 0, 0, 0]),
        (4, 2, None, [0, 0, 1, 1]),
        (4, 2, 2, [0, 1, 0, 1]),
        (8, 2, 2, [0, 0, 1, 1, 0, 0, 1, 1]),
    ],
)
def test_stages_of_an_even_split(layers: int, stages: int, virtual: int | None, expected: list[int]) -> None:
    args = arguments(
        num_layers=layers, pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual
    )
    rows = model_linears(args)
    assert [row.stage for row in rows[::4]] == expected
    assert [row.name for row in rows] == decoder_linear_names(layers)


def test_flops_count_one_gemm_of_each_linear() -> None:
    flops = gemm_flops(model_linears(arguments()))
    assert len(flops) == 16
    assert flops["decoder.layers.0.mlp.linear_fc1"] == 2 * 192 * 64
