"""Memory: what was measured, and how it moves with formats and parallelism."""

import json
from pathlib import Path

import pytest

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import layer_activations, saved_input, stage_memory
from snip_megatron.planner.models import Llama
from snip_megatron.precision import Format, Formats

from .formula import layout

MEASURED = json.loads(
    (Path(__file__).parents[3] / "benchmarks/results/layers/layer_llama-8b_h200_2026-11-21.json").read_text()
)
BF16: Formats = (Format.BF16,) * 3
FP8: Formats = (Format.FP8,) * 3
TENSOR: Formats = (Format.FP8_TENSOR,) * 3


def measured_layout() -> Layout:
    shape = MEASURED["shape"]
    hidden, heads = shape["hidden"], shape["heads"]
    sizes = (shape["blocks"], hidden, shape["ffn"], heads, shape["groups"], hidden // heads)
    return layout(Llama("measured", *sizes, vocabulary=128, context=shape["seq"]), global_batch_size=4)


@pytest.mark.parametrize(("row", "formats"), [("snip fp8", FP8), ("snip fp8_tensor", TENSOR), ("snip fp4", FP8)])
def test_saved_inputs_are_those_measured_on_an_h200(row: str, formats: Formats) -> None:
    chosen = measured_layout()
    result = sum(saved_input(chosen, row, formats) for row in chosen.model.rows)
    assert result == pytest.approx(MEASURED["rows"][row]["linears_saved_bytes"], rel=1e-6)


def test_bf16_inputs_are_those_measured_but_for_attentions_own_output() -> None:
    chosen = measured_layout()
    result = sum(saved_input(chosen, row, BF16) for row in chosen.model.rows)
    shared = chosen.model.blocks * 2 * chosen.tokens * chosen.model.hidden
    assert result + shared == MEASURED["rows"]["our spec bf16, not converted"]["linears_saved_bytes"]


@pytest.mark.parametrize(("row", "formats"), [("snip bf16", BF16), ("snip fp8", FP8), ("snip fp8_tensor", TENSOR)])
def test_the_measured_peak_within_a_twentieth(row: str, formats: Formats) -> None:
    result = stage_memory(measured_layout(), 0, lambda row: formats)
    # The quantised weights of the step before were there when the measurement began.
    peak = result["activations"] + result["working"]
    assert peak == pytest.approx(MEASURED["rows"][row]["peak_bytes_above_start"], rel=0.05)


def test_sequence_parallelism_keeps_bf16_shards_of_gathered_inputs() -> None:
    plain, parallel = layout("70b", tp=8), layout("70b", tp=8, sequence_parallel=True)
    fc1 = plain.kinds["mlp.linear_fc1"]
    assert saved_input(parallel, fc1, FP8) == saved_input(parallel, fc1, BF16) == 2 * 8192 * 8192 / 8
    assert saved_input(plain, fc1, FP8) == pytest.approx(8192 * 8192 * (1 + 4 / 128))
    parts = [layer_activations(chosen, chosen.stages[0][0], lambda row: BF16) for chosen in (plain, parallel)]
    assert parts[1] < parts[0]
