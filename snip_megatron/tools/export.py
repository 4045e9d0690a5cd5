"""``snip export --format NAME MAP --out DIR``: writes a map in the format of another tool.

``megatron`` writes YAML for Megatron's ``--te-precision-config-file``, one file per pipeline stage
(:mod:`snip_megatron.precision.recipes`).

``te`` writes a Python module with a quantizer factory for Transformer Engine's ``CustomRecipe``. A GEMM reads both
operands in its own format, and a tensor has a row-wise and a column-wise representation. The three formats of a linear
therefore determine the two formats of each of its tensors: fprop reads W row-wise and X row-wise, dgrad W column-wise
and G row-wise, wgrad X column-wise and G column-wise.

Neither export imports Megatron or Transformer Engine.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from snip_megatron.numerics.products.transformer_engine import FACTORY_MODULE, QUANTIZERS, factory_source
from snip_megatron.precision import FOUR_BIT, Format, Formats, Gemm, LinearId, PrecisionMap
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.precision.recipes import SUBSTITUTIONS, collapse, is_recipe_file, stage_file
from snip_megatron.runtime.run_data import read_config, step_files
from snip_megatron.runtime.storage import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that both formats share, and those of ``--format megatron``."""
    text = (
        "megatron: a map as YAML for Megatron's --te-precision-config-file, one file per pipeline stage;"
        " te: a map as a Python module with a quantizer factory for Transformer Engine's CustomRecipe;"
        " default: megatron"
    )
    parser.add_argument("--format", choices=("megatron", "te"), default="megatron", help=text)
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="the map to export, or a run directory: its last map"
    )
    text = (
        "folder for the output; created if it does not exist; or with --format megatron a name that ends in .yaml, for"
    )
    text += " the file of a single pipeline stage"
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help=text)
    add = parser.add_argument_group("--format megatron").add_argument
    add("--pp", type=int, default=1, metavar="N", help="pipeline parallel size; default: 1")
    add("--layers", metavar="A,B,…", help="numbers of layers of all stages; default: an even split")
    text = "if the GEMMs of a linear have different formats, use the widest of them"
    add("--collapse", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Write the files of the chosen format. Returns 0. Raises SnipError if a file or the format does not allow it."""
    if args.source.is_dir():
        read_config(args.source)  # a directory of something else is refused here
        maps = step_files(args.source, "maps")
        if not maps:
            raise SnipError(f"{args.source}: the run adopted no map")
        args.source = maps[max(maps)]
    precision_map = PrecisionMap.load(args.source)
    formats = {linear: precision_map.formats_of(str(linear)) for linear in precision_map.linears()}
    if not formats:
        raise SnipError(f"{args.source}: names no linear")
    if args.format == "te":
        _export_te(args, formats)
    else:
        _export_megatron(args, formats)
    return 0


def _write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write texts by file name. Raises SnipError if the folder cannot be written."""
    try:
        for name, text in texts.items():
            write_atomically(folder / name, text.encode())
    except OSError as error:
        raise SnipError(f"{folder}: cannot be written ({error})") from None


# -- --format te ---------------------------------------------------------------------------------------------------
def _export_te(args: argparse.Namespace, formats: dict[LinearId, Formats]) -> None:
    """Write the module, and print its path and how Megatron loads it. Linears that a map does not name run in bf16."""
    for linear, formats_of_linear in formats.items():
        for gemm, fmt in zip(Gemm, formats_of_linear, strict=True):
            if fmt not in QUANTIZERS:
                names = ", ".join(quantizer.value for quantizer in QUANTIZERS)
                raise SnipError(
                    f"{args.source}: {linear} runs {gemm.value} in {fmt.value}, for which Transformer Engine has no"
                    f" quantizer (it has them for {names}): choose the map among these (--snip-formats)"
                )
    path: Path = args.out / f"{FACTORY_MODULE}.py"
    _write_files(args.out, {path.name: factory_source(formats, str(args.source))})
    count = Counter(fmt for formats_of_linear in formats.values() for fmt in formats_of_linear)
    gemms = ", ".join(f"{count[fmt]} in {fmt.value}" for fmt in QUANTIZERS if count[fmt])
    print(f"{len(formats)} linears; GEMMs: {gemms}")
    print(
        "Megatron: --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe custom"
        f" --fp8-quantizer-factory {FACTORY_MODULE}.quantizer_factory"
    )
    print(f"with {args.out} in PYTHONPATH, and {FACTORY_MODULE}.name_linears(model) called in the model provider")
    print(path)


# -- --format megatron ---------------------------------------------------------------------------------------------
def _export_megatron(args: argparse.Namespace, formats: dict[LinearId, Formats]) -> None:
    """Write ``stage_<k>.yaml`` for every stage, and print which formats changed."""
    widest = {linear: collapse(formats_of_linear) for linear, formats_of_linear in formats.items()}
    mixed = {linear: ", ".join(fmt.value for fmt in three) for linear, three in formats.items() if len(set(three)) > 1}
    if mixed and not args.collapse:
        linear, names = next(iter(mixed.items()))
        raise SnipError(
            f"{args.source}: {linear} runs its GEMMs in {names}, and Megatron's file has one recipe a linear"
            f" ({len(mixed)} such linears): pass --collapse to take the widest of each"
        )
    stages = stage_layers(_count_layers(widest, args.source), args.pp, _parse_layers(args.layers))
    texts = {f"stage_{stage}.yaml": stage_file(widest, stage, layers, args.pp) for stage, layers in enumerate(stages)}
    folder: Path = args.out
    if is_recipe_file(folder):
        if args.pp > 1:
            raise SnipError(f"--out {folder}: a file is for one pipeline stage, and --pp is {args.pp}; give a folder")
        folder, texts = folder.parent, {folder.name: texts["stage_0.yaml"]}
    _write_files(folder, texts)
    for path in () if is_recipe_file(args.out) else folder.glob("stage_*.yaml"):  # of an earlier export
        if path.name not in texts:
            path.unlink(missing_ok=True)
    for linear, names in mixed.items():
        print(f"{linear}: {names} → {widest[linear].value}")
    if mixed:
        print(f"{len(mixed)} of {len(widest)} linears collapsed to the widest of their formats")
        if FOUR_BIT.isdisjoint(widest.values()) and (lost := FOUR_BIT.intersection(itertools.chain(*formats.values()))):
            names = " and ".join(sorted(lost))
            print(
                f"no linear is left in four bits, because each with GEMMs in {names} has a wider one too: a map of"
                " snip solve RUN --granularity layer has one format a linear, and keeps them"
            )
    count = Counter(widest.values())
    for fmt, text in SUBSTITUTIONS.items():
        if count[fmt]:
            print(f"{text} ({count[fmt]} linears)")
    print(*(folder / name for name in texts), sep="\n")
    if args.pp > 1:
        print("a rank takes the file of its stage, RANK * PP // WORLD_SIZE in Megatron's default order of ranks")


def stage_layers(layers: int, stages: int, counts: Sequence[int] | None = None) -> list[range]:
    """Return the layers of every pipeline stage. ``counts`` are the numbers of layers of the stages.

    If ``counts`` is None, the split is even, as Megatron's is. Raises SnipError if the numbers do not fit.
    """
    if stages < 1:
        raise SnipError(f"--pp {stages}: must be 1 or more")
    if counts is None:
        if layers % stages:
            raise SnipError(f"{layers} layers do not divide over {stages} stages: give --layers, the layers of each")
        counts = [layers // stages] * stages
    if len(counts) != stages:
        raise SnipError(f"--layers names {len(counts)} stages, the pipeline has {stages} (--pp)")
    if sum(counts) != layers:
        raise SnipError(f"--layers {','.join(map(str, counts))} is {sum(counts)} layers in all, the map has {layers}")
    return [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(stages)]


def _parse_layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise SnipError(f"--layers {cut(text)}: must be numbers of layers separated by commas")
    return [int(part) for part in parts]


def _count_layers(formats: Mapping[LinearId, Format], source: Path) -> int:
    """Return the number of layers of the map. Raises SnipError if the map names no linear of one of them."""
    named = {linear.layer for linear in formats if linear.stack == "decoder"}
    layers = 1 + max(named, default=-1)
    if missing := sorted(set(range(layers)) - named):
        raise SnipError(f"{source}: says nothing about decoder layer {missing[0]}")
    return layers
