"""``snip solve``: a problem file in, a map out."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path

from snip_megatron.errors import SnipError

INFEASIBLE_EXIT = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``snip solve``."""
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json", help="a snip.problem/1 file")
    parser.add_argument(
        "--out", type=Path, metavar="MAP.json", help="where to write the map (default: standard output)"
    )
    parser.add_argument("--solver", choices=("cpsat", "greedy"), default="cpsat", help="default: %(default)s")
    parser.add_argument("--time-limit", type=_seconds, metavar="S", help="wall seconds (default: 60)")


def run(args: argparse.Namespace) -> int:
    """Solve and write the map; 0 for a map, 3 for infeasible. Raises SnipError on bad input."""
    from snip_megatron.solver import Problem, solve

    problem = Problem.from_json(_read(args.problem), where=str(args.problem))
    solution = solve(problem, time_limit_s=args.time_limit, solver=args.solver)
    if solution.status == "infeasible":
        raise SnipError(f"{args.problem}: {solution.fault}", exit_code=INFEASIBLE_EXIT)
    text = solution.to_map_json()
    if args.out is None:
        sys.stdout.write(text)
    else:
        _write(args.out, text)
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SnipError(f"{path}: cannot be read: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    """Whole or not at all: written beside the target, then renamed."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise SnipError(f"{path}: cannot be written: {error.strerror}") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
