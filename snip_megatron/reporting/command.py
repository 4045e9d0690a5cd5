"""`snip report RUN [--out FILE]`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory (--snip-dir of a training run)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the page (default: RUN/report.html)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path. Raises SnipError."""
    from snip_megatron.reporting.report import write_report

    print(write_report(args.run, args.out))
    return 0
