"""Maps that cannot be written as a quantizer factory of Transformer Engine. What it makes of others is in tests/te."""

from pathlib import Path

import pytest
from dense_names import dense_names
from snip_command import refused

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, option_id
from snip_megatron.tools.te_factory import factory_source

CHOICES = {option_id(name, gemm): Format.FP8 for name in dense_names(2) for gemm in Gemm}
FC1 = "decoder.layers.1.mlp.linear_fc1"


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (CHOICES | {f"{FC1}:dgrad": Format.MXFP4}, f"{FC1} runs dgrad in mxfp4"),
        (CHOICES | {f"{FC1}:fprop": Format.NVFP4_46}, f"{FC1} runs fprop in nvfp4_46"),
        ({}, "names no linear"),
    ],
)
def test_maps_that_are_refused(choices: dict[str, Format], words: str, tmp_path: Path) -> None:
    source = tmp_path / "map.json"
    source.write_text(PrecisionMap(choices).to_json())
    assert words in refused("export", "--format", "te", source, "--out", tmp_path / "recipe")
    assert not (tmp_path / "recipe").exists()


def test_any_path_of_a_map_gives_a_module() -> None:
    formats = {LinearId.parse(name): (Format.FP8,) * 3 for name in dense_names(2)}
    text = factory_source(formats, 'a\n"""b\\@FORMATS@é')
    compile(text, "module", "exec")
    assert text.count(f'{FC1}":') == 1
