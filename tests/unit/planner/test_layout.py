"""Layouts: blocks as Megatron places them, sizes that it would refuse refused."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from refusal import refusal

from .formula import SMALL, layout, with_blocks


@pytest.mark.parametrize(("blocks", "pp"), [(8, 1), (8, 4), (126, 9)])
def test_stages_are_megatrons(blocks: int, pp: int) -> None:
    result = layout(with_blocks(SMALL, blocks), pp=pp)
    sizes = {"num_layers": blocks, "hidden_size": 64, "num_attention_heads": 4, "pipeline_model_parallel_size": pp}
    config = TransformerConfig(**sizes, pipeline_dtype=torch.bfloat16)
    for stage in range(pp):
        count = get_num_layers_to_build(config, pp_rank=stage)
        first = get_transformer_layer_offset(config, pp_rank=stage)
        assert [rows[0].id.layer for rows in result.stages[stage]] == list(range(first, first + count))


def test_parameters_of_the_stages_are_those_of_the_model() -> None:
    result = layout("70b", tp=8, pp=8)
    norms = 7 * (2 * 80 * 8192 + 8192)  # every tensor parallel rank has its own
    padding = 2 * (129_024 - 128_256) * 8192
    assert sum(result.stage_parameters(stage) for stage in range(8)) * 8 == result.model.parameters + norms + padding


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "--tp 3: small has 8 heads, which cannot be split over 3 ranks"),
        ({"tp": 0}, "--tp 0: must be a whole number from 1 to 2147483648"),
        ({"pp": 3}, "--pp 3: small has 8 blocks, not divisible by 3; choose another size"),
        ({"dp": 3, "global_batch_size": 8}, "--global-batch-size 8: must be a multiple of --micro-batch-size × --dp"),
        ({"seq_length": 100, "tp": 8, "sequence_parallel": True}, "--sequence-parallel: --seq-length 100 cannot be"),
    ],
)
def test_refusals(sizes: dict[str, Any], message: str) -> None:
    assert refusal(layout, **sizes).startswith(message)
