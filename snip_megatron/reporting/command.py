"""`snip report RUN [RUN …] [--out FILE] [--cost MODEL]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from snip_megatron.errors import SnipError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="run directory (--snip-dir of a training run); several are compared on one page",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="where to write the page (default: RUN/report.html; of several RUN/comparison.html in the first)",
    )
    parser.add_argument(
        "--cost",
        metavar="MODEL",
        help="cost model of the predicted time saved: flops, a table such as h200, or a file of snip calibrate"
        " (default: the times that the run solved with, else flops)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path. Raises SnipError."""
    from snip_megatron.reporting.comparison import write_comparison
    from snip_megatron.reporting.report import write_report

    if len(args.runs) == 1:
        print(write_report(args.runs[0], args.out, args.cost))
        return 0
    if args.cost is not None:
        raise SnipError("--cost is of one run's page; leave it out to compare runs")
    print(write_comparison(args.runs, args.out))
    return 0
