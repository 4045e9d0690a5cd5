"""`snip report RUN [--out FILE | --json]`."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip report``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory (--snip-dir of a training)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--out", metavar="FILE", type=Path, help="file for the page; default: RUN/report.html")
    text = "instead of a page, print as JSON (snip.worth/1) whether the run was worth it"
    instead.add_argument("--json", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, or print figures. Returns 0. Raises SnipError."""
    if args.json:
        from snip_megatron.records.run_data import load_run
        from snip_megatron.records.storage import dump_json
        from snip_megatron.reporting.summary import summarise

        print(dump_json(summarise(load_run(args.run)).as_dict()), end="")
    else:
        from snip_megatron.reporting.report import write_report

        print(write_report(args.run, args.out))
    return 0
