"""``snip solve``: solves a problem file, or the problem of an update that a run stored, and writes the map."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError, plain_arguments
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.options import add_options, given_options, parse_pins, parse_tolerance
from snip_megatron.runtime.storage import check_folder, deliver
from snip_megatron.tools.cli import positive

if TYPE_CHECKING:
    from snip_megatron.runtime.stored_problems import StoredUpdate
    from snip_megatron.solver import Problem, Solution

_REPLACEABLE = ("policy", "estimator", "q", "granularity", "formats", "stage_tolerance", "pin")
"""Options of a training that may be replaced when its statistics are solved again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip solve``."""
    add = parser.add_argument
    text = "a problem file (snip.problem/1 or /2), a run directory (its latest update), or a file of its stats/"
    add("problem", type=Path, metavar="PROBLEM.json", help=text)
    add("--out", type=Path, metavar="MAP.json", help="file for the map, or for a plan; default: standard output")
    add(
        "--solver", choices=("cpsat", "greedy"), default="cpsat", help="greedy stops at a good solution; default: cpsat"
    )
    seconds = positive("a number of seconds above 0")
    add("--time-limit", type=seconds, metavar="S", help="wall-clock seconds that a solve may take; default: 60")
    add("--budget", metavar="KIND=X", help="as --snip-budget of a training; default: the budget of the problem")
    stored = parser.add_argument_group("solve a run's statistics with other settings")
    stored.add_argument("--step", type=int, metavar="N", help="step of an earlier update; default: the latest update")
    text = "times for speedup= and loss=: a file of snip calibrate, h100, h200 or flops; default: those of the run"
    stored.add_argument("--timings", metavar="NAME|FILE", help=text)
    add_options(stored, SnipConfig, prefix="--", only=_REPLACEABLE, default="the run's")


def run(args: argparse.Namespace) -> int:
    """Solve and write the map, or the plan of a problem over phases. Returns 0. Raises SnipError (3 if infeasible).

    A summary goes to standard output, or to standard error if the map goes there.
    """
    from snip_megatron.solver import solve

    check_folder("--out", args.out)
    problem, stored = _problem(args)
    solution = solve(problem, time_limit_s=args.time_limit, solver=args.solver).met(str(args.problem))
    result: PrecisionMap | PrecisionPlan = solution.to_precision_map()
    if problem.phases:  # a plan, whose steps are counted from 0
        result = solution.to_plan()
    elif stored is not None:
        result = stored.with_fp4_share(solution.to_precision_map())
    deliver("--out", args.out, result.to_json())
    print("\n".join(_summary(solution)), file=sys.stderr if args.out is None else sys.stdout)
    return 0


def _summary(solution: Solution) -> list[str]:
    """Return lines that say what was solved, and how many options each format has."""
    reached = solution.speedup if solution.speedup is not None else solution.achieved or 0.0
    what = "speedup of the linears" if solution.budget.timed else "share in four bits"
    loss = 0.0 if solution.loss is None else solution.loss
    lines = [f"{solution.status} for --budget {solution.budget}: {what} {reached:.4g}, sum of losses {loss:.4g}"]
    for number, part in enumerate(solution.phases or (solution,)):
        counts = Counter(fmt.value for fmt in part.choices.values())
        where = f"phase {number}, {solution.steps[number]} steps: " if solution.phases else ""
        lines.append(f"{where}{', '.join(f'{count} in {fmt}' for fmt, count in sorted(counts.items()))}")
    return lines


def _problem(args: argparse.Namespace) -> tuple[Problem, StoredUpdate | None]:
    """Return the problem to solve, and the stored update that it is from. The update is None for a problem file."""
    from snip_megatron.precision.budget import Budget
    from snip_megatron.precision.strict_json import read_file
    from snip_megatron.runtime.stored_problems import find_stored, is_statistics, rebuild
    from snip_megatron.solver import Problem

    changes = given_options(args, SnipConfig, "", _REPLACEABLE)  # fields of the run's request
    with plain_arguments():
        if "pin" in changes:
            changes["pins"] = parse_pins(changes.pop("pin"))
        if "stage_tolerance" in changes:
            changes["stage_tolerance"] = parse_tolerance(changes["stage_tolerance"])
    stored = find_stored(args.problem, args.step)
    budget = None if args.budget is None else Budget.parse(args.budget, "--budget")
    if stored is None:
        if changes or args.timings is not None or is_statistics(args.problem):
            subject = "--policy and the like" if changes else "--timings" if args.timings is not None else "statistics"
            raise SnipError(f"{args.problem}: lies in no run directory, whose config.json {subject} need")
        problem = Problem.from_json(read_file(args.problem), where=str(args.problem))
        if budget is not None and budget.timed != problem.budget.timed:  # both belong to the other kind of budget
            problem = replace(problem, stage_tolerance=None, fixed_cost=())
    elif changes or args.timings is not None or not stored.path("problems").exists() or is_statistics(args.problem):
        return rebuild(stored, changes, budget, args.timings), stored
    else:
        problem = stored.problem()
        # Another budget is met by one map, and costs are FLOPs under fp4= and seconds under the other budgets.
        if budget is not None and (problem.phases or budget.timed != problem.budget.timed):
            return rebuild(stored, changes, budget, args.timings), stored
    return problem if budget is None else replace(problem, budget=budget), stored
