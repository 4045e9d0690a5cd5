"""`snip report RUN [RUN …] [--out FILE] [--json]`."""

import argparse
from pathlib import Path

from snip_megatron.errors import SnipError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip report``."""
    add = parser.add_argument
    text = "run directory (--snip-dir of a training); several are compared on one page"
    add("runs", metavar="RUN", type=Path, nargs="+", help=text)
    text = "file for the page; default: RUN/report.html, for several runs comparison.html in the first RUN"
    add("--out", metavar="FILE", type=Path, help=text)
    text = "instead of a page, print as JSON (snip.worth/1) whether the run was worth it"
    add("--json", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, or print figures. Returns 0. Raises SnipError."""
    if len(args.runs) == 1:
        return _of_one(args, args.runs[0])
    if args.json:
        raise SnipError("--json is of one run; leave it out to compare runs")
    from snip_megatron.reporting.comparison import write_comparison

    print(write_comparison(args.runs, args.out))
    return 0


def _of_one(args: argparse.Namespace, path: Path) -> int:
    if args.json and args.out is not None:
        raise SnipError("--out has no effect with --json; leave it out")
    if args.json:
        from snip_megatron.records.run_data import load_run
        from snip_megatron.records.storage import dump_json
        from snip_megatron.reporting.summary import summarise

        print(dump_json(summarise(load_run(path)).as_dict()), end="")
    else:
        from snip_megatron.reporting.report import write_report

        print(write_report(path, args.out))
    return 0
