"""Writes a precision map as YAML for Megatron's ``--te-precision-config-file``, one file per pipeline stage.

Megatron matches the globs of a file against the module names of the model chunk that a rank builds, in which layers
count from 0. Transformer Engine runs all three GEMMs of a linear in one recipe, so ``--collapse`` reduces a map of
granularity ``gemm`` to the widest format of each linear. Neither Megatron nor Transformer Engine is needed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Format, Formats, LinearId, PrecisionMap
from snip_megatron.records.storage import write_atomically

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
def chunk_layers(layers: int, stages: int, virtual: int = 1, counts: Sequence[int] | None = None) -> list[list[range]]:
    """Return the global layer indices [stage][chunk] of a pipeline with ``virtual`` model chunks per stage.

    ``counts`` are the layers of every chunk in the model's order (chunk c lies on stage c mod stages); None for an even
    split. Raises SnipError if the layers do not divide evenly, or if ``counts`` does not match pipeline or layers.
    """
    chunks = stages * virtual
    if counts is None:
        if layers % chunks:
            raise SnipError(f"{layers} layers do not divide over {chunks} chunks: give --layers, the layers of each")
        counts = [layers // chunks] * chunks
    if len(counts) != chunks:
        raise SnipError(f"--layers names {len(counts)} chunks, the pipeline has {chunks} (--pp times --vpp)")
    if sum(counts) != layers:
        raise SnipError(f"--layers {','.join(map(str, counts))} is {sum(counts)} layers in all, the map has {layers}")
    starts = [sum(counts[:c]) for c in range(chunks)]
    ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return [[ranges[v * stages + stage] for v in range(virtual)] for stage in range(stages)]


def local_formats(formats: Mapping[LinearId, Format], stage: int, chunks: Sequence[range]) -> dict[str, Format]:
    """Return module name in a chunk (layers counted from 0) → format.

    Raises SnipError if two chunks of the stage need different recipes for one name: Megatron loads one file for all
    chunks of a rank and cannot tell them apart.
    """
    found: dict[str, tuple[Format, LinearId]] = {}
    for layers in chunks:
        for linear, fmt in formats.items():
            if linear.stack != "decoder" or linear.layer not in layers:
                continue
            name = str(replace(linear, layer=linear.layer - layers.start))
            earlier, owner = found.setdefault(name, (fmt, linear))
            if RECIPES[earlier] != RECIPES[fmt]:
                raise SnipError(
                    f"stage {stage}: {name} is {owner} ({earlier.value}) in one chunk and {linear} ({fmt.value}) in"
                    " another, and Megatron's file cannot tell chunks of a virtual pipeline apart: export for a"
                    " pipeline without --vpp, or make a map whose chunks agree (pins)"
                )
    return {name: fmt for name, (fmt, _) in found.items()}


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
    group.add_argument("--vpp", type=int, default=1, metavar="N", help="model chunks per pipeline stage; default: 1")
    group.add_argument(
        "--layers", metavar="A,B,…", help="numbers of layers of all chunks in the model's order; default: an even split"
    )
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
    stages = chunk_layers(_layers(formats, args.source), args.pp, args.vpp, _counts(args))
    texts = {}
    for stage, chunks in enumerate(stages):
        own = ", ".join(f"{c.start} to {c.stop - 1}" for c in chunks if c) or "none"
        comment = [f"Pipeline stage {stage} of {args.pp}: decoder layers {own}, counted from 0 within a chunk."]
        comment += ["For --te-precision-config-file of that stage's ranks, with --transformer-impl transformer_engine."]
        own_formats = local_formats(formats, stage, chunks)
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
    for name in ("pp", "vpp"):
        if getattr(args, name) < 1:
            raise SnipError(f"--{name} {getattr(args, name)}: must be 1 or more")
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
