"""``snip export --format NAME MAP --out DIR``: writes a map in the format of another tool."""

import argparse
from pathlib import Path

from snip_megatron.tools import te_factory, te_precision

_FORMATS = {
    "megatron": "a map as YAML for Megatron's --te-precision-config-file, one file per pipeline stage",
    "te": "a map as a Python module with a quantizer factory for Transformer Engine's CustomRecipe",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all formats share, and those of each format."""
    formats = "; ".join(f"{name}: {text}" for name, text in _FORMATS.items())
    parser.add_argument("--format", choices=tuple(_FORMATS), required=True, help=formats)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the map to export")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="folder for the output; created if it does not exist"
    )
    te_precision.add_arguments(parser.add_argument_group("--format megatron"))


def run(args: argparse.Namespace) -> int:
    """Run the export of the chosen format. Returns its exit code. Raises SnipError."""
    return te_factory.run(args) if args.format == "te" else te_precision.run(args)
