"""`snip doctor [--json] [--dir DIR] [--port N] [--strict]`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from snip_megatron.precision.errors import SnipError
from snip_megatron.tools.checks.check import Check, Status
from snip_megatron.tools.checks.hardware import check_backends, check_hardware
from snip_megatron.tools.checks.host import check_host
from snip_megatron.tools.checks.packages import check_packages

_MARKS = {Status.OK: "ok  ", Status.NOTE: "note", Status.FAIL: "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip doctor``."""
    add = parser.add_argument
    add("--json", action="store_true", help="print the checks as JSON (snip.doctor/1)")
    add("--dir", metavar="DIR", type=Path, default=Path(), help="where runs will write; default: the current folder")
    add("--port", metavar="N", type=int, default=29500, help="port of torchrun's rendezvous; default: 29500")
    add("--strict", action="store_true", help="exit with code 1 also if there are only notes")


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises SnipError if the port is out of range.

    Returns exit code 0 if training under SNIP can run here, 1 if something that it needs is missing or wrong, or with
    ``--strict`` if there is a note.
    """
    if not 0 < args.port < 65536:
        raise SnipError(f"--port {args.port}: must lie between 1 and 65535")
    checks = [*check_packages(), *check_hardware(), *check_backends(), *check_host(args.dir, args.port)]
    body = {"schema": "snip.doctor/1", "checks": [check.as_dict() for check in checks]}
    print(json.dumps(body) if args.json else _text(checks))
    wrong = {Status.FAIL, Status.NOTE} if args.strict else {Status.FAIL}
    return 1 if any(check.status in wrong for check in checks) else 0


def _text(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    room = ""
    for check in checks:
        if check.room != room:
            room = check.room
            lines += ["", room] if lines else [room]
        lines.append(f"  {_MARKS[check.status]} {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"       {'':<{width}}  → {check.advice}")
    failed = sum(check.status is Status.FAIL for check in checks)
    verdict = "ready: training under SNIP can run here" if not failed else f"not ready: {failed} to mend (FAIL above)"
    return "\n".join([*lines, "", verdict])
