"""What leaves culprits in bf16: files that Megatron's own parser reads, its arguments, and the cost in speed."""

from pathlib import Path
from typing import Any

import pytest
from llama_arguments import linears, run_arguments
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe

from snip_megatron.layers.registry import load_map
from snip_megatron.megatron.remedy import RemedyWriter
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity.blame import Blame, Culprit, Remedy

FIRST, LAST = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.7.mlp.linear_fc2"


def remedy(
    folder: Path,
    *culprits: str,
    formats: Format = Format.FP8,
    recipe: HostRecipe | None = None,
    timings: str | None = None,
    **changes: Any,
) -> Remedy:
    """The remedy of a step of eight layers whose culprits are the fprops of these linears."""
    off = {"first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    args = run_arguments(**{"pipeline_model_parallel_size": 1, "num_layers": 8, **off, **changes})
    rows = linears(args).covered
    job = PrecisionMap({option_id(row.name, gemm): formats for row in rows for gemm in Gemm})
    actual = [Culprit(name, "fprop", None, None, "fp8", 0.1, 0.1, 0.9, 0.9, confirmed=True) for name in culprits]
    actual.append(Culprit(rows[5].name, "wgrad", None, None, "fp8", 0.1, 0.1, 0.1, None, confirmed=False))
    blame = Blame(60, None, "snip", "fp8", "rounding", "it is", {}, culprits=tuple(actual))
    config = SnipConfig(enabled=True, blame="60", timings=timings)
    result = RemedyWriter(config, args, rows, recipe).write(blame, job, folder).remedy
    assert result is not None
    return result


def recipe_of(path: str, name: str) -> str | None:
    """What Megatron lets a linear do: another recipe, ``bf16``, or None for the job's own."""
    config = get_quant_config_or_none(name, load_quantization_recipe(path))
    if config is None:
        return None
    recipe = TEQuantizationParams.parse_from_config(config).training_recipe
    assert recipe.override_quantized_autocast
    return recipe.fp8_quantization_recipe or recipe.fp4_quantization_recipe or "bf16"


def test_a_job_under_snip_gets_pins_a_map_and_the_files_of_other_tools(tmp_path: Path) -> None:
    arguments = remedy(tmp_path, FIRST, timings="h200")
    assert arguments.pins == ("--snip-pin", f"{FIRST}:fprop=bf16")
    assert arguments.map is not None
    assert arguments.megatron is not None
    assert arguments.recipe is not None
    names = [row.name for row in linears(run_arguments(num_layers=8)).covered]
    written = load_map(arguments.map, names)
    bf16 = [(name, gemm) for name in names for gemm in Gemm if written.format_of(name, gemm) is Format.BF16]
    assert bf16 == [(FIRST, Gemm.FPROP)]
    assert {name: recipe_of(arguments.megatron, name) for name in (FIRST, LAST)} == {FIRST: "bf16", LAST: "blockwise"}
    assert f'"{FIRST}": ("bf16", "fp8", "fp8")' in Path(arguments.recipe).read_text()
    assert arguments.slowdown is not None
    assert 1.0 < arguments.slowdown < 1.05
    (note,) = arguments.notes
    assert note.startswith("in Megatron's file fp8 → blockwise FP8 of Transformer Engine: ")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    arguments = remedy(tmp_path, FIRST, formats=Format.FP4, virtual_pipeline_model_parallel_size=2)
    assert (arguments.megatron, arguments.recipe, arguments.slowdown) == (None, None, None)
    for words in ("no quantizer for fp4", "chunks of a virtual pipeline", "give --snip-timings"):
        assert sum(words in note for note in arguments.notes) == 1


def test_a_job_of_megatron_s_own_formats_keeps_them_elsewhere(tmp_path: Path) -> None:
    host = HostRecipe("tensorwise", hybrid=True)
    arguments = remedy(tmp_path, FIRST, LAST, formats=Format.FP8_TENSOR, recipe=host, timings="h200", hidden_size=4096)
    assert (arguments.pins, arguments.map, arguments.recipe) == ((), None, None)
    counts = ("--num-layers-at-start-in-bf16", "1", "--num-layers-at-end-in-bf16", "1")
    assert arguments.arguments == ("--first-last-layers-bf16", *counts)
    assert arguments.megatron is not None
    middle = "decoder.layers.0.mlp.linear_fc2", "decoder.layers.3.mlp.linear_fc1"
    assert [recipe_of(arguments.megatron, name) for name in (FIRST, LAST, *middle)] == ["bf16", "bf16", None, None]
    assert arguments.slowdown is not None
    assert arguments.slowdown > 1.0
    assert any("no quantizer for fp8 hybrid, recipe tensorwise" in note for note in arguments.notes)


def test_files_of_pipeline_stages_count_layers_from_0(tmp_path: Path) -> None:
    recipe = HostRecipe("delayed")
    arguments = remedy(tmp_path, LAST, recipe=recipe, formats=Format.FP8_TENSOR, pipeline_model_parallel_size=2)
    assert arguments.megatron is not None
    on_stage = "decoder.layers.3.mlp.linear_fc2"
    files = [str(Path(arguments.megatron) / f"stage_{stage}.yaml") for stage in range(2)]
    assert [recipe_of(path, on_stage) for path in files] == [None, "bf16"]
    assert arguments.arguments == ()  # Megatron refuses them under delayed scaling


@pytest.mark.parametrize(
    ("layer", "first_last", "expected"), [(3, False, ()), (1, False, ("2", "0")), (1, True, ()), (6, False, ("0", "2"))]
)
def test_layers_stay_whole_where_they_are_few(
    layer: int, first_last: bool, expected: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = remedy(
        tmp_path, f"decoder.layers.{layer}.mlp.linear_fc1", recipe=HostRecipe("blockwise"),
        first_last_layers_bf16=first_last,
    )  # fmt: skip
    assert arguments.arguments[2::2] == expected
    assert arguments.recipe is not None  # finer: only one GEMM leaves the recipe


def test_no_culprit_no_remedy(tmp_path: Path) -> None:
    args = run_arguments()
    blame = Blame(60, None, "snip", "fp8", "not_precision", "it is not", {})
    assert RemedyWriter(SnipConfig(), args, linears(args).covered).write(blame, PrecisionMap({}), tmp_path) is blame
    assert not list(tmp_path.iterdir())
