"""Writes a precision map as YAML for Megatron's ``--te-precision-config-file``, one file per pipeline stage.

Megatron matches the globs of a file against the module names of the model chunk that a rank builds, in which layers
count from 0: it cannot tell the chunks of a virtual pipeline apart. Transformer Engine runs all three GEMMs of a linear
in one recipe, so ``--collapse`` reduces a map of granularity ``gemm`` to the widest format of each linear. Neither
Megatron nor Transformer Engine is needed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from snip_megatron.precision import Format, Formats, LinearId, PrecisionMap
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.runtime.storage import write_atomically

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

_FIELDS: Mapping[str, Mapping[str, str]] = {
    "bf16": {},
    "fp8_blockwise": {"fp8_quantization_recipe": "blockwise", "fp8_format": "e4m3"},
    "fp8_tensorwise": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "e4m3"},
    "mxfp8": {"fp8_quantization_recipe": "mxfp8", "fp8_format": "e4m3"},
    "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
}

SUBSTITUTIONS: Mapping[Format, str] = {
    Format.FP4: "fp4 → nvfp4: Transformer Engine has no 4-bit format of 1×128 tiles with FP32 scales",
    Format.MXFP4: "mxfp4 → nvfp4: Transformer Engine trains in no MXFP4",
    Format.NVFP4: "nvfp4 → nvfp4 of Transformer Engine: wgrad's operands pass a Hadamard transform unless"
    " NVTE_NVFP4_DISABLE_RHT=1 is set",
    Format.FP8: "fp8 → blockwise FP8 of Transformer Engine: the same tiles, scales rounded up to powers of two unless"
    " NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 is set",
}
"""Format → message about the recipe that replaces it."""


# -- one format per linear -----------------------------------------------------------------------------------------
def read_formats(path: Path) -> dict[LinearId, Formats]:
    """Return the formats of every linear that the map in a file names.

    Raises SnipError if the file cannot be read, is not a map, or names no linear.
    """
    precision_map = PrecisionMap.load(path)
    found = {linear: precision_map.formats_of(str(linear)) for linear in precision_map.linears()}
    if not found:
        raise SnipError(f"{path}: names no linear")
    return found


def collapse(three: Formats) -> Format:
    """Return the widest of the formats of a linear, so that no GEMM runs in fewer bits than the map says.

    A variant becomes the format that it is a variant of: a recipe knows no others.
    """
    return min((fmt.base for fmt in three), key=list(RECIPES).index)


# -- layers and stages ---------------------------------------------------------------------------------------------
def stage_layers(layers: int, stages: int, counts: Sequence[int] | None = None) -> list[range]:
    """Return the global layer indices of each stage of a pipeline.

    ``counts`` are the layers of every stage; None for an even split. Raises SnipError if the layers do not divide
    evenly, or if ``counts`` does not match pipeline or layers.
    """
    if counts is None:
        if layers % stages:
            raise SnipError(f"{layers} layers do not divide over {stages} stages: give --layers, the layers of each")
        counts = [layers // stages] * stages
    if len(counts) != stages:
        raise SnipError(f"--layers names {len(counts)} stages, the pipeline has {stages} (--pp)")
    if sum(counts) != layers:
        raise SnipError(f"--layers {','.join(map(str, counts))} is {sum(counts)} layers in all, the map has {layers}")
    return [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(stages)]


# -- the file ------------------------------------------------------------------------------------------------------
def recipe_yaml(formats: Mapping[str, Format], comment: Sequence[str] = ()) -> str:
    """Return the text of one file, which lists every linear by its exact name. Evaluation uses the training recipe."""
    used = [name for name in _FIELDS if name in {RECIPES[fmt] for fmt in formats.values()}]
    lines = [*(f"# {line}" for line in comment), "configs:"]
    for name in used:
        lines += [
            f"  {name}:",
            '    transformer_engine_config_type: "TEQuantizationParams"',
            "    training_recipe:",
            *(f"      {key}: {json.dumps(value)}" for key, value in _FIELDS[name].items()),
            "      override_quantized_autocast: true",
            "      override_nonquantized_autocast: true",
        ]
    lines.append("matchers:")
    for name, fmt in formats.items():
        lines += [
            f"  {name}:",
            '    type: "glob"',
            f"    pattern: {json.dumps(name.replace('.experts.linear_', '.experts.*linear_'))}",  # experts may be apart
            f"    config: {json.dumps(RECIPES[fmt])}",
            "    enabled: true",
        ]
    return "\n".join(lines) + "\n"


# -- the command ---------------------------------------------------------------------------------------------------
def add_arguments(group: Any) -> None:
    """Add the arguments of ``snip export --format megatron``."""
    group.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline parallel size; default: 1")
    group.add_argument("--layers", metavar="A,B,…", help="numbers of layers of all stages; default: an even split")
    text = "if the GEMMs of a linear have different formats, use the widest of them"
    group.add_argument("--collapse", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Write ``stage_<k>.yaml`` for every stage and print changed formats. Returns the exit code. Raises SnipError."""
    threes = read_formats(args.source)
    formats = {linear: collapse(three) for linear, three in threes.items()}
    mixed = {linear: ", ".join(fmt.value for fmt in three) for linear, three in threes.items() if len(set(three)) > 1}
    if mixed and not args.collapse:
        first, three = next(iter(mixed.items()))
        raise SnipError(
            f"{args.source}: {first} runs its GEMMs in {three}, and Megatron's file has one recipe a linear"
            f" ({len(mixed)} such linears): pass --collapse to take the widest of each"
        )
    stages = stage_layers(_layers(formats, args.source), args.pp, _counts(args))
    texts = {}
    for stage, layers in enumerate(stages):
        own = f"{layers.start} to {layers.stop - 1}" if layers else "none"
        comment = [f"Pipeline stage {stage} of {args.pp}: decoder layers {own}, counted from 0 within the stage."]
        comment += ["For --te-precision-config-file of that stage's ranks, with --transformer-impl transformer_engine."]
        own_formats = {
            str(replace(linear, layer=linear.layer - layers.start)): fmt
            for linear, fmt in formats.items()
            if linear.stack == "decoder" and linear.layer in layers
        }
        if stage == args.pp - 1:
            own_formats |= {str(linear): fmt for linear, fmt in formats.items() if linear.stack == "mtp"}
        texts[f"stage_{stage}.yaml"] = recipe_yaml(own_formats, comment)
    write_files(args.out, texts)
    for path in args.out.glob("stage_*.yaml"):  # of an earlier export with more stages
        if path.name not in texts:
            path.unlink(missing_ok=True)
    for linear, three in mixed.items():
        print(f"{linear}: {three} → {formats[linear].value}")
    if mixed:
        print(f"{len(mixed)} of {len(formats)} linears collapsed to the widest of their formats")
    count = Counter(formats.values())
    for fmt, text in SUBSTITUTIONS.items():
        if count[fmt]:
            print(f"{text} ({count[fmt]} linears)")
    print(*(args.out / name for name in texts), sep="\n")
    if args.pp > 1:
        print("a rank takes the file of its stage, RANK * PP // WORLD_SIZE in Megatron's default order of ranks")
    return 0


def _layers(formats: Mapping[LinearId, Format], source: Path) -> int:
    """Return the number of layers of the map. Raises SnipError if it says nothing about one."""
    named = {linear.layer for linear in formats if linear.stack == "decoder"}
    layers = 1 + max(named, default=-1)
    if missing := sorted(set(range(layers)) - named):
        raise SnipError(f"{source}: says nothing about decoder layer {missing[0]}")
    return layers


def _counts(args: argparse.Namespace) -> list[int] | None:
    if args.pp < 1:
        raise SnipError(f"--pp {args.pp}: must be 1 or more")
    if args.layers is None:
        return None
    parts = args.layers.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise SnipError(f"--layers {cut(args.layers)}: must be numbers of layers separated by commas")
    return [int(part) for part in parts]


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files by name. Raises SnipError if the folder cannot be written."""
    try:
        for name, text in texts.items():
            write_atomically(folder / name, text.encode())
    except OSError as error:
        raise SnipError(f"{folder}: cannot be written ({error})") from None
