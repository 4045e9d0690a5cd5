"""Writes a precision map as a Python module with a quantizer factory for Transformer Engine's ``CustomRecipe``.

A GEMM reads both operands in its own format, and a tensor has a row-wise and a column-wise representation. The three
formats of a linear therefore determine the two formats of each of its tensors: fprop reads W row-wise and X row-wise,
dgrad W column-wise and G row-wise, wgrad X column-wise and G column-wise. Every map can be expressed, except formats
without a quantizer. Neither Megatron nor Transformer Engine is needed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

from snip_megatron.numerics.products.transformer_engine import QUANTIZERS
from snip_megatron.precision import Formats, Gemm, LinearId
from snip_megatron.precision.errors import SnipError
from snip_megatron.tools.te_precision import read_formats, write_files

MODULE = "snip_te_map"
"""Name of the written module."""

_EMPTY = "FORMATS: dict[str, tuple[str, str, str]] = {}"


def check_quantizers(formats: dict[LinearId, Formats], where: str) -> None:
    """Raise SnipError if a linear has a format without a quantizer. Linears that the map does not name run in bf16."""
    known = ", ".join(fmt.value for fmt in QUANTIZERS)
    for linear, three in formats.items():
        for gemm, fmt in zip(Gemm, three, strict=True):
            if fmt not in QUANTIZERS:
                raise SnipError(
                    f"{where}: {linear} runs {gemm.value} in {fmt.value}, for which Transformer Engine has no quantizer"
                    f" (it has them for {known}): choose the map among these (--snip-formats)"
                )


def factory_source(formats: dict[LinearId, Formats], source: str) -> str:
    """Return the text of the module. ``source`` names the map in a comment."""
    lines = [
        f"    {json.dumps(str(linear))}: ({', '.join(json.dumps(fmt.value) for fmt in three)}),"
        for linear, three in formats.items()
    ]
    formats_of_map = "\n".join([f"# Written from {json.dumps(source)}.", _EMPTY[:-1], *lines, "}"])
    text = Path(str(files("snip_megatron.numerics.products") / f"{MODULE}.py")).read_text(encoding="utf-8")
    return text.replace(_EMPTY, formats_of_map)


# -- the command ---------------------------------------------------------------------------------------------------
def run(args: argparse.Namespace) -> int:
    """Write the module, and print its path and how Megatron loads it. Returns the exit code.

    Raises SnipError if the map cannot be expressed, or the folder cannot be written.
    """
    formats = read_formats(args.source)
    check_quantizers(formats, str(args.source))
    path: Path = args.out / f"{MODULE}.py"
    write_files(args.out, {path.name: factory_source(formats, str(args.source))})
    count = Counter(fmt for three in formats.values() for fmt in three)
    gemms = ", ".join(f"{count[fmt]} in {fmt.value}" for fmt in QUANTIZERS if count[fmt])
    print(f"{len(formats)} linears; GEMMs: {gemms}")
    print(
        "Megatron: --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe custom"
        f" --fp8-quantizer-factory {MODULE}.quantizer_factory"
    )
    print(f"with {args.out} in PYTHONPATH, and {MODULE}.name_linears(model) called in the model provider")
    print(path)
    return 0
