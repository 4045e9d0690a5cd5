"""Files of Megatron's ``--te-precision-config-file``, read as maps. ``snip export`` writes them."""

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from snip_megatron.precision.errors import SnipError, cut, located
from snip_megatron.precision.formats import Format
from snip_megatron.precision.map import PrecisionMap
from snip_megatron.precision.strict_json import mapping, one_of, read_file

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
            here = f"matchers.{cut(name)}"
            matcher = mapping(matcher, here)
            if matcher.get("enabled"):
                one_of(matcher.get("type"), f"{here}.type", ("glob",))
                config = one_of(matcher.get("config"), f"{here}.config", tuple(formats))
                recipes.append((str(matcher.get("pattern")), formats[config]))
        return recipes


def _format(config: Any, where: str) -> Format:
    recipe = mapping(mapping(config, where).get("training_recipe"), f"{where}.training_recipe")
    for field, known in (("fp8_quantization_recipe", _FP8), ("fp4_quantization_recipe", _FP4)):
        if recipe.get(field) is not None:
            return known[one_of(recipe[field], f"{where}.training_recipe.{field}", tuple(known))]
    return Format.BF16


def map_of_recipes(recipes: Recipes, linears: Sequence[str]) -> PrecisionMap:
    """Return the map of ``linears``. One that no glob matches runs in bf16."""
    choices = {
        name: next((fmt for glob, fmt in recipes if fnmatch.fnmatch(name, glob)), Format.BF16) for name in linears
    }
    return PrecisionMap(choices)
