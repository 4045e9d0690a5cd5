"""The decoder's linears by Megatron's arguments: names, shapes, stages and FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
from llama_arguments import arguments
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from snip_megatron.megatron.model_linears import gemm_flops, model_linears
from snip_megatron.precision import dense_names


def shapes(**given: Any) -> dict[str, tuple[int, int]]:
    return {row.id.path: (row.n, row.k) for row in model_linears(arguments(**given))[:4]}


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
    assert [row.name for row in rows] == dense_names(layers)


@pytest.mark.parametrize(
    ("stages", "virtual", "given", "expected"),
    [
        (2, None, {"decoder_first_pipeline_num_layers": 2}, [0, 0, 1, 1, 1, 1, 1, 1]),
        (3, None, {"decoder_last_pipeline_num_layers": 4}, [0, 0, 1, 1, 2, 2, 2, 2]),
        (
            3,
            2,
            {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2},
            [0, 1, 1, 2, 0, 1, 1, 2],
        ),
        (3, None, {"account_for_embedding_in_pipeline_split": True}, [0, 0, 1, 1, 1, 2, 2, 2]),
        (3, None, {"account_for_loss_in_pipeline_split": True}, [0, 0, 0, 1, 1, 1, 2, 2]),
        (4, None, {"pipeline_model_parallel_layout": "E|tt|t*5|tL"}, [1, 1, 2, 2, 2, 2, 2, 3]),
        (2, 2, {"pipeline_model_parallel_layout": "Et|tt|ttt|ttL"}, [0, 1, 1, 0, 0, 0, 1, 1]),
    ],
)
def test_stages_of_an_uneven_split(
    stages: int, virtual: int | None, given: dict[str, Any], expected: list[int]
) -> None:
    split = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual}
    args = arguments(num_layers=8, **split, **given)
    assert [row.stage for row in model_linears(args)[::4]] == expected
    if args.pipeline_model_parallel_layout is not None:
        return
    args.num_layers_in_first_pipeline_stage = args.decoder_first_pipeline_num_layers
    args.num_layers_in_last_pipeline_stage = args.decoder_last_pipeline_num_layers
    built = {  # what Megatron builds
        get_transformer_layer_offset(args, chunk, stage) + i: stage
        for stage in range(stages)
        for chunk in range(virtual or 1)
        for i in range(get_num_layers_to_build(args, chunk, stage))
    }
    assert [built[layer] for layer in range(8)] == expected


def test_flops_count_one_gemm_of_each_linear() -> None:
    flops = gemm_flops(model_linears(arguments()))
    assert len(flops) == 16
    assert flops["decoder.layers.0.mlp.linear_fc1"] == 2 * 192 * 64
