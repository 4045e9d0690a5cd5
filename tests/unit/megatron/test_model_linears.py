"""The linears of a model that is built on the meta device: names, shapes, stages, places and FLOPs."""

from typing import Any

import pytest
from dense_names import dense_names
from megatron.core.transformer.transformer_config import MLATransformerConfig
from meta_models import on_meta, rows_of

from snip_megatron.megatron.compat.meta_model import CannotBuildError
from snip_megatron.precision import LinearRow


def test_a_dense_decoder_has_the_same_linears_on_every_layout() -> None:
    result = on_meta()
    assert (result.names, result.uncovered) == (dense_names(4), ())
    shapes = [(128, 64), (64, 64), (192, 64), (64, 96)]
    assert result.covered == tuple(
        LinearRow(name, 0, *shapes[i % 4]) for i, name in enumerate(dense_names(4))
    )  # the places that rows of dense decoders have by default
    split = on_meta(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert [(r.name, r.n, r.k) for r in split.covered] == [(r.name, r.n, r.k) for r in result.covered]
    assert result.flops["decoder.layers.0.mlp.linear_fc1"] == 2 * 192 * 64


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "options", "expected"),
    [
        (4, 2, None, {}, [0, 0, 1, 1]),
        (4, 2, 2, {}, [0, 1, 0, 1]),
        (8, 2, None, {"num_layers_in_first_pipeline_stage": 2}, [0, 0, 1, 1, 1, 1, 1, 1]),
        (8, 3, None, {"account_for_embedding_in_pipeline_split": True}, [0, 0, 1, 1, 1, 2, 2, 2]),
        (8, 4, None, {"pipeline_model_parallel_layout": "E|tt|t*5|tL"}, [1, 1, 2, 2, 2, 2, 2, 3]),
    ],
)
def test_stages_are_those_that_megatron_builds(
    layers: int, stages: int, virtual: int | None, options: dict[str, Any], expected: list[int]
) -> None:
    actual = on_meta(
        num_layers=layers, pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual, **options
    )
    assert [row.stage for row in actual.covered[::4]] == expected
    assert actual.names == dense_names(layers)


def test_experts_have_one_row_and_the_flops_of_what_a_token_meets() -> None:
    result = on_meta(
        num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48, moe_layer_freq=[0, 1, 1, 0],
        moe_shared_expert_intermediate_size=32, expert_model_parallel_size=2,
    )  # fmt: skip
    everything = (*result.covered, *result.uncovered)
    mixed, dense = rows_of(everything, 1), rows_of(everything, 3)
    first = mixed["mlp.experts.linear_fc1"]
    assert (first.n, first.k, first.experts, first.active, first.flops) == (96, 64, 4, 2, 2.0 * 2 * 96 * 64)
    assert mixed["mlp.shared_experts.linear_fc2"].flops == 2.0 * 64 * 32
    assert [row.sub_block for path, row in mixed.items() if ".experts." in path] == [3, 3]
    assert set(dense) == {name.split(".", 3)[3] for name in dense_names(1)}


def test_what_cannot_be_built_here_is_said() -> None:
    with pytest.raises(CannotBuildError, match=r"the model cannot be built on this machine .*divisible"):
        on_meta(num_layers=3, pipeline_model_parallel_size=2)


def test_latent_attention_is_built_without_transformer_engine() -> None:
    result = on_meta(MLATransformerConfig, multi_latent_attention=True, num_query_groups=4, rope_type="rope")
    assert "self_attention.linear_kv_up_proj" in rows_of(result.covered, 0)
