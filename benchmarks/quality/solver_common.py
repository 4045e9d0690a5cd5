"""Common parts of the solver's benchmarks: proofs and their times, the origin of a result, the command line."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def proofs(solve: Callable[[Any], Any], problems: Iterable[Any], label: str) -> dict[str, Any]:
    """Solve ``problems`` one by one. Returns how many were proven, the largest gap, wall and processor seconds."""
    wall, processor, optimal, gap = [], [], 0, 0.0
    for number, problem in enumerate(problems):
        begun = time.process_time()
        solution = solve(problem)
        processor.append(time.process_time() - begun)
        wall.append(solution.solve_seconds)
        optimal += solution.status == "optimal"
        gap = max(gap, solution.gap or 0.0)
        print(label, number, solution.status, f"{processor[-1]:.2f} processor s", file=sys.stderr, flush=True)
    return {"instances": len(wall), "optimal": optimal, "largest_gap": gap, "wall_s": wall, "processor_s": processor}


def median_and_most(row: dict[str, Any], name: str, digits: int) -> str:
    """Return the cell ``median, max`` of a row's list of seconds."""
    return f"{statistics.median(row[name]):.{digits}f}, {max(row[name]):.{digits}f}"


def origin(command: str) -> dict[str, Any]:
    """Return date, commit, command, hardware, versions and the load at the start of a measurement."""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "command": command,
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores",
        "versions": {name: version(name) for name in ("ortools", "numpy", "scipy")}
        | {"python": sys.version.split()[0]},
        "load_average_before": os.getloadavg()[0],
    }


def origin_lines(result: dict[str, Any]) -> list[str]:
    """Return what the tables of a result begin with."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return [
        f"{result['date']}, commit `{result['commit'][:12]}`, {result['hardware']}, {versions}.",
        f"`{result['command']}`; load average {result['load_average_before']:.1f} before,"
        f" {result['load_average_after']:.1f} after",
    ]


def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
) -> None:
    """Measure as the command line says, write the result and print its tables, or print those of an earlier one."""
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path, metavar="RESULT.json", help="print the tables of a result")
    args = parser.parse_args()
    if args.markdown is not None:
        print(markdown(json.loads(args.markdown.read_text())), end="")
        return
    result = measure(args)
    if args.out is not None:
        args.out.write_text(json.dumps(result) + "\n")
    print(markdown(result), end="")
