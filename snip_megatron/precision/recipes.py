"""Files of Megatron's ``--te-precision-config-file``, written from maps and read as maps.

Megatron matches the globs of a file against the module names of the model chunk that a rank builds, in which layers
count from 0. A file is therefore that of one pipeline stage, and cannot tell the chunks of a virtual pipeline apart.
All three GEMMs of a linear have one recipe.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from snip_megatron.precision.errors import SnipError, cut, located
from snip_megatron.precision.formats import Format, Formats
from snip_megatron.precision.linears import LinearId
from snip_megatron.precision.map import PrecisionMap
from snip_megatron.precision.strict_json import mapping, one_of, read_file

RECIPES: Mapping[Format, str] = {
    Format.BF16: "bf16",
    Format.FP8: "fp8_blockwise",
    Format.MXFP8: "mxfp8",
    Format.FP8_TENSOR: "fp8_tensorwise",
    Format.NVFP4: "nvfp4",
    Format.MXFP4: "nvfp4",
    Format.FP4: "nvfp4",
}
"""Format → name of its recipe in the file. From wide to narrow: by bits, then by how many elements share a scale."""

SUBSTITUTIONS: Mapping[Format, str] = {
    Format.FP4: "fp4 → nvfp4: Transformer Engine has no 4-bit format of 1×128 tiles with FP32 scales",
    Format.MXFP4: "mxfp4 → nvfp4: Transformer Engine trains in no MXFP4",
    Format.NVFP4: "nvfp4 → nvfp4 of Transformer Engine: wgrad's operands pass a Hadamard transform unless"
    " NVTE_NVFP4_DISABLE_RHT=1 is set",
    Format.FP8: "fp8 → blockwise FP8 of Transformer Engine: the same tiles, scales rounded up to powers of two unless"
    " NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 is set",
}
"""Format → message about the recipe that replaces it."""

_RECIPE_FIELDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_blockwise": {"fp8_quantization_recipe": "blockwise", "fp8_format": "e4m3"},
    "fp8_tensorwise": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "e4m3"},
    "mxfp8": {"fp8_quantization_recipe": "mxfp8", "fp8_format": "e4m3"},
    "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
}
_FP8 = {"blockwise": Format.FP8, "tensorwise": Format.FP8_TENSOR, "mxfp8": Format.MXFP8}
_FP4 = {"nvfp4": Format.NVFP4}
_STAGE = re.compile(rb"# Pipeline stage \d+ of (\d+)")

Recipes = list[tuple[str, Format]]
"""(glob, format) of every matcher that is enabled. The first glob that matches a linear decides."""


def is_recipe_file(path: Path | str) -> bool:
    """Return whether the name of a map is that of a YAML file."""
    return Path(path).suffix in (".yaml", ".yml")


def read_recipes(path: Path | str, argument: str = "") -> Recipes:
    """Read a file. Raises SnipError, which names ``argument`` and the file, if it has formats that SNIP has not."""
    where = f"{argument} {path}".strip()
    content = read_file(path, where)
    stage = _STAGE.match(content)
    with located(where):
        if stage is not None and int(stage[1]) > 1:
            raise SnipError(f"is the file of one of {int(stage[1])} pipeline stages; export the map with --pp 1")
        try:
            body = mapping(yaml.safe_load(content), "file")
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SnipError(f"not YAML: {error}") from None
        configs = mapping(body.get("configs"), "configs")
        formats = {name: _format(config, f"configs.{cut(name)}") for name, config in configs.items()}
        recipes = []
        for name, matcher in mapping(body.get("matchers"), "matchers").items():
            matcher_path = f"matchers.{cut(name)}"
            matcher = mapping(matcher, matcher_path)
            if matcher.get("enabled"):
                one_of(matcher.get("type"), f"{matcher_path}.type", ("glob",))
                config = one_of(matcher.get("config"), f"{matcher_path}.config", tuple(formats))
                recipes.append((str(matcher.get("pattern")), formats[config]))
        return recipes


def _format(config: Any, where: str) -> Format:
    recipe = mapping(mapping(config, where).get("training_recipe"), f"{where}.training_recipe")
    for field, by_recipe in (("fp8_quantization_recipe", _FP8), ("fp4_quantization_recipe", _FP4)):
        if recipe.get(field) is not None:
            return by_recipe[one_of(recipe[field], f"{where}.training_recipe.{field}", tuple(by_recipe))]
    return Format.BF16


def map_of_recipes(recipes: Recipes, linears: Sequence[str]) -> PrecisionMap:
    """Return the map of ``linears``. One that no glob matches runs in bf16."""
    choices = {
        name: next((fmt for glob, fmt in recipes if fnmatch.fnmatch(name, glob)), Format.BF16) for name in linears
    }
    return PrecisionMap(choices)


# -- written ---------------------------------------------------------------------------------------------------------
def collapse(formats: Formats) -> Format:
    """Return the widest of the formats of a linear, so that no GEMM runs in fewer bits than the map says.

    A variant becomes the format that it is a variant of: Transformer Engine has no recipes of variants.
    """
    return min((fmt.base for fmt in formats), key=list(RECIPES).index)


def stage_file(formats: Mapping[LinearId, Format], stage: int, layers: range, stages: int) -> str:
    """Return the file of a stage: its layers, counted from 0, and on the last stage those of multi-token prediction.

    The file lists every linear by its exact name. Megatron takes the training recipe in evaluation too.
    """
    of_stage = {
        str(replace(linear, layer=linear.layer - layers.start)): fmt
        for linear, fmt in formats.items()
        if linear.stack == "decoder" and linear.layer in layers
    }
    if stage == stages - 1:
        of_stage |= {str(linear): fmt for linear, fmt in formats.items() if linear.stack == "mtp"}
    span = f"{layers.start} to {layers.stop - 1}" if layers else "none"
    recipes = {RECIPES[fmt] for fmt in of_stage.values()}
    overrides = {"override_quantized_autocast": True, "override_nonquantized_autocast": True}
    configs = {
        name: {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": fields | overrides}
        for name, fields in _RECIPE_FIELDS.items()
        if name in recipes
    }
    matchers = {
        # Megatron may build the linears of experts one by one, with the number of the expert in the name.
        name: {
            "type": "glob",
            "pattern": name.replace(".experts.linear_", ".experts.*linear_"),
            "config": RECIPES[fmt],
            "enabled": True,
        }
        for name, fmt in of_stage.items()
    }
    head = (
        f"# Pipeline stage {stage} of {stages}: decoder layers {span}, counted from 0 within the stage.\n"
        "# For --te-precision-config-file of that stage's ranks, with --transformer-impl transformer_engine.\n"
    )
    return head + str(yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False))
