"""``snip export --format NAME SOURCE --out DIR``: each format is a module with its own arguments."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from snip_megatron.export import te_precision

TARGETS: dict[str, tuple[str, str]] = {
    "megatron": (
        "snip_megatron.export.te_precision",
        "a map as YAML for Megatron's --te-precision-config-file, one file per pipeline stage",
    ),
    "te": (
        "snip_megatron.export.te_factory",
        "a map as a Python module with a quantizer factory for Transformer Engine's CustomRecipe",
    ),
}
"""Format → (module with ``run(args) -> exit code``, description of what it writes)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all formats share, and those of each format."""
    formats = "; ".join(f"{name}: {text}" for name, (_, text) in TARGETS.items())
    parser.add_argument("--format", choices=tuple(TARGETS), required=True, help=formats)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the map to export")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="folder for the output; created if it does not exist"
    )
    te_precision.add_arguments(parser.add_argument_group("--format megatron"))


def run(args: argparse.Namespace) -> int:
    """Run the export of the chosen format. Returns its exit code. Raises SnipError."""
    return int(importlib.import_module(TARGETS[args.format][0]).run(args))
