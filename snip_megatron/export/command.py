"""``snip export --format NAME SOURCE --out DIR``: one module a format, with its own arguments."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

TARGETS: dict[str, tuple[str, str]] = {
    "megatron": (
        "snip_megatron.export.te_precision",
        "a map as YAML for Megatron's --te-precision-config-file, one file a pipeline stage",
    ),
    "hf": ("snip_megatron.export.hf_llama", "a Megatron checkpoint as a Hugging Face Llama"),
}
"""Name → (module with ``add_arguments(group)`` and ``run(args) -> exit code``, what it writes)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that all formats share, and each format's own."""
    formats = "; ".join(f"{name}: {text}" for name, (_, text) in TARGETS.items())
    parser.add_argument("--format", choices=tuple(TARGETS), required=True, help=formats)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="what to export: a map, a checkpoint")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write into; made if missing")
    for name, (module, _) in TARGETS.items():
        importlib.import_module(module).add_arguments(parser.add_argument_group(f"--format {name}"))


def run(args: argparse.Namespace) -> int:
    """Run the chosen format's export. Raises SnipError."""
    return int(importlib.import_module(TARGETS[args.format][0]).run(args))
