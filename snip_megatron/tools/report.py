"""`snip report RUN [RUN …] [--out FILE] [--json | --live [--port N]]`."""

import argparse
import contextlib
import socket
from pathlib import Path

from snip_megatron.precision.errors import SnipError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip report``."""
    add = parser.add_argument
    text = "run directory (--snip-dir of a training); several are compared on one page"
    add("runs", metavar="RUN", type=Path, nargs="+", help=text)
    text = "file for the page; default: RUN/report.html, for several runs comparison.html in the first RUN"
    add("--out", metavar="FILE", type=Path, help=text)
    instead = parser.add_mutually_exclusive_group()
    text = "instead of a page, print as JSON (snip.worth/1) whether the run was worth it"
    instead.add_argument("--json", action="store_true", help=text)
    instead.add_argument("--live", action="store_true", help="serve the page of a running job here, until Ctrl-C")
    add("--port", metavar="N", type=int, help="port of --live on 127.0.0.1; 0: any free port; default: 8765")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, print figures, or serve the page. Returns 0. Raises SnipError."""
    if args.port is not None and not args.live:
        raise SnipError("--port is that of --live; leave it out, or add --live")
    if len(args.runs) == 1:
        return _of_one(args, args.runs[0])
    for name in ("json", "live"):
        if getattr(args, name):
            raise SnipError(f"--{name} is of one run; leave it out to compare runs")
    from snip_megatron.reporting.comparison import write_comparison

    print(write_comparison(args.runs, args.out))
    return 0


def _of_one(args: argparse.Namespace, path: Path) -> int:
    if (args.json or args.live) and args.out is not None:
        raise SnipError(f"--out has no effect with --{'json' if args.json else 'live'}; leave it out")
    if args.json:
        from snip_megatron.reporting.summary import summarise
        from snip_megatron.runtime.records.run_data import load_run
        from snip_megatron.runtime.records.storage import dump_json

        print(dump_json(summarise(load_run(path)).as_dict()), end="")
    elif args.live:
        _serve(path, args.port)
    else:
        from snip_megatron.reporting.report import write_report

        print(write_report(path, args.out))
    return 0


def _serve(path: Path, port: int | None) -> None:
    from snip_megatron.reporting.live import PORT, LiveServer

    server = LiveServer(path, PORT if port is None else port)
    host = socket.gethostname()
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    print(
        f"From another machine: ssh -L {server.port}:127.0.0.1:{server.port} {host}, then the same address", flush=True
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
