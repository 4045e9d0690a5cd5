"""``snip report``: writes the page of a run, prints its summary, or serves the page while the job runs."""

import argparse
import contextlib
import socket
from pathlib import Path

from snip_megatron.precision.errors import SnipError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip report``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory (--snip-dir of a training)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--out", metavar="FILE", type=Path, help="file for the page; default: RUN/report.html")
    text = "instead of a page, print as JSON (snip.worth/1) whether the run was worth it"
    output.add_argument("--json", action="store_true", help=text)
    text = "instead of a page, print which linears are sensitive, the most harmful GEMMs first"
    output.add_argument("--sensitivity", action="store_true", help=text)
    output.add_argument("--live", action="store_true", help="serve the page of a running job here, until Ctrl-C")
    text = "port of --live on 127.0.0.1; 0: any free port; default: 8765"
    parser.add_argument("--port", metavar="N", type=int, help=text)


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, print the summary, or serve the page. Returns 0. Raises SnipError."""
    if args.port is not None and not args.live:
        raise SnipError("--port is that of --live; leave it out, or add --live")
    if args.json:
        from snip_megatron.reporting.summary import summarise
        from snip_megatron.runtime.run_data import load_run
        from snip_megatron.runtime.storage import dump_json

        print(dump_json(summarise(load_run(args.run)).as_dict()), end="")
    elif args.sensitivity:
        from snip_megatron.reporting.sensitivity import lines, rank_run, unit_of
        from snip_megatron.runtime.run_data import load_run

        recorded = load_run(args.run)
        print(
            *lines(rank_run(recorded), unit_of(str(recorded.config.get("policy")), str(recorded.config.get("q")))),
            sep="\n",
        )
    elif args.live:
        _serve(args.run, args.port)
    else:
        from snip_megatron.reporting.report import write_report

        print(write_report(args.run, args.out))
    return 0


def _serve(path: Path, port: int | None) -> None:
    from snip_megatron.reporting.live import PORT, LiveServer

    server = LiveServer(path, PORT if port is None else port)
    tunnel = f"ssh -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}"
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    print(f"From another machine: {tunnel}, then the same address", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
