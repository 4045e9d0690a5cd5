"""`snip doctor [--json] [--dir DIR]`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

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


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Returns exit code 0 if training under SNIP can run here, 1 if something that it needs is missing or wrong.
    """
    checks = [*check_packages(), *check_hardware(), *check_backends(), *check_host(args.dir)]
    body = {"schema": "snip.doctor/1", "checks": [check.as_dict() for check in checks]}
    print(json.dumps(body) if args.json else _text(checks))
    return int(any(check.status is Status.FAIL for check in checks))


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
