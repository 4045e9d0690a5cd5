"""``snip export``: recipes as Megatron's own parser reads them, and maps that a format cannot express.

Tests in tests/te load the module that ``--format te`` writes.
"""

from pathlib import Path

import pytest
from dense_names import dense_names
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe
from refusal import refusal
from snip_command import refused, snip

from snip_megatron.layers.registry import load_map
from snip_megatron.precision import DENSE_LAYER, Format, Formats, Gemm, LinearId, PrecisionMap, option_id
from snip_megatron.precision.recipes import RECIPES, collapse
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.tools.export import stage_layers

EXPECTED = {
    Format.BF16: (None, None),
    Format.FP8: (Fp8Recipe.blockwise, None),
    Format.FP8_TENSOR: (Fp8Recipe.tensorwise, None),
    Format.MXFP8: (Fp8Recipe.mxfp8, None),
    Format.NVFP4: (None, Fp4Recipe.nvfp4),
    Format.FP4: (None, Fp4Recipe.nvfp4),
    Format.MXFP4: (None, Fp4Recipe.nvfp4),
}
FORMATS = list(RECIPES)  # from wide to narrow


def layer_map(layers: int) -> PrecisionMap:
    """A map of granularity ``layer``. Neighbours differ, and so do equal places of different layers."""
    names = dense_names(layers)
    return PrecisionMap({name: FORMATS[(i + i // 4) % len(FORMATS)] for i, name in enumerate(names)})


def export(tmp_path: Path, precision_map: PrecisionMap, *arguments: str) -> Path:
    source, out = tmp_path / "map.json", tmp_path / "recipes"
    source.write_text(precision_map.to_json())
    assert snip("export", "--format", "megatron", source, "--out", out, *arguments).returncode == 0
    return out


def recipe_of(path: Path, name: str) -> tuple[str | None, str | None]:
    """Return the FP8 and FP4 recipes that Transformer Engine's linear of this module name would get."""
    config = get_quant_config_or_none(name, load_quantization_recipe(str(path)))
    assert config is not None
    params = TEQuantizationParams.parse_from_config(config)
    assert params.evaluation_recipe is None  # the training recipe holds there, too
    recipe = params.training_recipe
    # In force whether or not the run has a global fp8 or fp4 context.
    assert recipe.override_quantized_autocast
    assert recipe.override_nonquantized_autocast
    assert recipe.fp8_format == "e4m3"
    return recipe.fp8_quantization_recipe, recipe.fp4_quantization_recipe


def test_every_linear_gets_its_recipe_on_its_stage(tmp_path: Path) -> None:
    precision_map = layer_map(12)
    out = export(tmp_path, precision_map, "--pp", "2")
    assert sorted(p.name for p in out.iterdir()) == ["stage_0.yaml", "stage_1.yaml"]
    for layer in range(12):
        for kind in DENSE_LAYER:
            fmt = precision_map.choices[str(LinearId("decoder", layer, kind))]
            # Layer 10's name begins with layer 1's: globs must not mix them up.
            path, name = out / f"stage_{layer // 6}.yaml", f"decoder.layers.{layer % 6}.{kind}"
            assert recipe_of(path, name) == EXPECTED[fmt]
    whole = export(tmp_path, precision_map)
    assert [p.name for p in whole.iterdir()] == ["stage_0.yaml"]  # the longer pipeline's second file is gone
    for name, fmt in precision_map.choices.items():
        assert recipe_of(whole / "stage_0.yaml", name) == EXPECTED[fmt]
    recipe = load_quantization_recipe(str(whole / "stage_0.yaml"))
    for other in ("output_layer", "decoder.layers.3.self_attention.core_attention", "decoder.layers.0.mlp"):
        assert get_quant_config_or_none(other, recipe) is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_stages_hold_every_layer_once(counts: list[int]) -> None:
    split = stage_layers(sum(counts), len(counts), counts)
    assert [layer for stage in split for layer in stage] == list(range(sum(counts)))
    assert [len(stage) for stage in split] == counts


@given(st.tuples(*[st.sampled_from(FORMATS)] * 3))
def test_collapse_takes_the_widest(three: Formats) -> None:
    taken = collapse(three)
    assert taken in three
    assert all(FORMATS.index(taken) <= FORMATS.index(f) for f in three)
    assert collapse((Format.NVFP4_46, Format.NVFP4, Format.NVFP4_HADAMARD)) is Format.NVFP4


def test_maps_of_single_gemms_need_collapse_and_say_what_changed(tmp_path: Path) -> None:
    choices = {option_id(n, g): Format.FP8 for n in dense_names(2) for g in Gemm}
    choices["decoder.layers.1.mlp.linear_fc1:wgrad"] = Format.FP4
    for gemm in Gemm:
        choices[f"decoder.layers.0.mlp.linear_fc2:{gemm.value}"] = Format.FP4
    source = tmp_path / "map.json"
    source.write_text(PrecisionMap(choices).to_json())
    arguments = ("export", "--format", "megatron", source, "--out", tmp_path / "recipes")
    error = refused(*arguments)
    assert "decoder.layers.1.mlp.linear_fc1 runs its GEMMs in fp8, fp8, fp4" in error
    assert "--collapse" in error
    assert not (tmp_path / "recipes").exists()
    out = snip(*arguments, "--collapse").stdout.splitlines()
    assert out[0] == "decoder.layers.1.mlp.linear_fc1: fp8, fp8, fp4 → fp8"
    assert out[1] == "1 of 8 linears collapsed to the widest of their formats"
    assert out[2].startswith("fp4 → nvfp4: ")
    assert out[2].endswith("(1 linears)")
    assert "(7 linears)" in out[3]
    path = tmp_path / "recipes" / "stage_0.yaml"
    assert out[-1] == str(path)
    assert recipe_of(path, "decoder.layers.1.mlp.linear_fc1") == EXPECTED[Format.FP8]
    assert recipe_of(path, "decoder.layers.0.mlp.linear_fc2") == EXPECTED[Format.FP4]
    assert "no linear is left in four bits" not in "".join(out)
    source.write_text(PrecisionMap(choices | {"decoder.layers.0.mlp.linear_fc2:fprop": Format.FP8}).to_json())
    assert "no linear is left in four bits, because each with GEMMs in fp4 has" in snip(*arguments, "--collapse").stdout


def test_a_file_is_written_for_megatron_and_read_back_as_a_map(tmp_path: Path) -> None:
    names = [*dense_names(2), "decoder.layers.1.mlp.experts.linear_fc1"]
    formats = [Format.BF16, Format.FP8, Format.FP8_TENSOR, Format.MXFP8, Format.NVFP4]
    expected = {name: formats[i % len(formats)] for i, name in enumerate(names)}
    source, out = tmp_path / "map.json", tmp_path / "recipes.yaml"
    source.write_text(PrecisionMap(expected).to_json())
    command = ("export", source, "--out", out)  # --format megatron is the default
    assert snip(*command).stdout.splitlines()[-1] == str(out)
    assert load_map(str(out), names).choices == expected
    assert (
        load_map(str(out), [*names, "mtp.layers.0.mlp.linear_fc1"]).choices["mtp.layers.0.mlp.linear_fc1"]
        is Format.BF16
    )
    assert "a file is for one pipeline stage, and --pp is 2; give a folder" in refused(*command, "--pp", "2")

    out.write_text(out.read_text().replace(": tensorwise", ": delayed"))
    assert "training_recipe.fp8_quantization_recipe" in refusal(load_map, str(out), names)
    snip(*command[:-1], tmp_path / "folder", "--pp", "2")
    assert "one of 2 pipeline stages" in refusal(load_map, str(tmp_path / "folder" / "stage_0.yaml"), names)


def test_a_run_gives_the_map_that_it_adopted_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunDirectory(run, {}, overwrite=False, resume_step=None) as records:
        command = ("export", "--format", "megatron", run, "--out", tmp_path / "recipes")
        assert refused(*command) == f"{run}: the run adopted no map"
        for step, fmt in ((10, Format.FP8), (9, Format.NVFP4)):
            records.write("maps", step, PrecisionMap(dict.fromkeys(dense_names(2), fmt)).to_json())
    process = snip(*command)
    assert process.returncode == 0, process.stderr
    assert recipe_of(tmp_path / "recipes" / "stage_0.yaml", dense_names(2)[0]) == EXPECTED[Format.FP8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pp", "3"], "4 layers do not divide over 3 stages"),
        (["--pp", "2", "--layers", "1,2"], "3 layers in all, the map has 4"),
        (["--format", "onnx"], "onnx"),
    ],
)
def test_what_cannot_be_exported_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    source = tmp_path / "map.json"
    source.write_text(layer_map(4).to_json())
    command_line = ("export", "--format", "megatron", source, "--out", tmp_path / "out", *arguments)
    assert words in refused(*command_line)
    assert not (tmp_path / "out").exists()


FP8_MAP = {option_id(name, gemm): Format.FP8 for name in dense_names(2) for gemm in Gemm}
FC1 = "decoder.layers.1.mlp.linear_fc1"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (FP8_MAP | {f"{FC1}:dgrad": Format.MXFP4}, f"{FC1} runs dgrad in mxfp4"),
        (FP8_MAP | {f"{FC1}:fprop": Format.NVFP4_46}, f"{FC1} runs fprop in nvfp4_46"),
        ({}, "names no linear"),
    ],
)
def test_maps_without_a_quantizer_are_refused(choices: dict[str, Format], message: str, tmp_path: Path) -> None:
    source = tmp_path / "map.json"
    source.write_text(PrecisionMap(choices).to_json())
    assert message in refused("export", "--format", "te", source, "--out", tmp_path / "recipe")
    assert not (tmp_path / "recipe").exists()
