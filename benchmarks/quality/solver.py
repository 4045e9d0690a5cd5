"""Benchmark of ``snip_megatron.solver``: time to a certified gap, agreement with HiGHS, a million items.

python -m benchmarks.quality.solver --out F.json
python -m benchmarks.quality.solver --markdown F.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from solver.oracles import chosen, highs, least, phased_of_seed, random_problem, value_of  # noqa: E402

from benchmarks.common import write  # noqa: E402
from benchmarks.quality.solver_instances import MODELS, STRUCTURES, granular, instance, phased_instance, timed  # noqa: E402
from snip_megatron.solver import Problem, solve  # noqa: E402

SPEEDUP = 1.35
Named = Iterator[tuple[str, Problem]]


def families(seed: int) -> Named:
    """Yield the instances of one seed. Budgets of a loss ask for that of the solution at :data:`SPEEDUP`."""
    for model in MODELS:
        for formats in (2, 3, 6):
            yield f"{model.name}, {formats} formats, fp4", instance(model, formats, seed)
        yield from _timed(f"{model.name}, 3 formats", instance(model, 3, seed))
    for structure in STRUCTURES:
        yield f"70b, 4 phases, {structure}, fp4", phased_instance(structure, seed)
    yield from _timed("70b, 4 phases, run", phased_instance("run", seed))


def _timed(name: str, problem: Problem) -> Named:
    fast = timed(problem, "speedup", SPEEDUP)
    yield f"{name}, speedup", fast
    yield f"{name}, loss", timed(problem, "loss", solve(fast, deterministic_time=5).loss or 0.0)


def solved(seeds: int, limit: float) -> list[dict[str, Any]]:
    """Solve the instances of every family within ``limit`` deterministic seconds."""
    rows: dict[str, dict[str, Any]] = {}
    for seed in range(seeds):
        for name, problem in families(seed):
            begun = time.process_time()
            solution = solve(problem, deterministic_time=limit)
            processor = time.process_time() - begun
            row = rows.setdefault(name, {"family": name, "optimal": 0, "gap": [], "wall_s": [], "processor_s": []})
            row["optimal"] += solution.status == "optimal"
            row["gap"].append(solution.gap)
            row["wall_s"].append(solution.solve_seconds)
            row["processor_s"].append(processor)
            print(seed, name, solution.status, f"{processor:.2f} processor s", file=sys.stderr, flush=True)
    return list(rows.values())


def agreement(instances: int) -> dict[str, Any]:
    """Compare with HiGHS on random problems, half of them of one map and half over phases."""
    found: dict[str, Any] = {"instances": instances, "optimal": 0, "infeasible_for_both": 0, "largest_excess": 0.0}
    for seed in range(instances):
        problem = phased_of_seed(seed)
        if seed % 2:
            rng = np.random.default_rng([seed, 500])
            items, formats, stages = (int(rng.integers(a, b)) for a, b in ((10, 120), (2, 7), (1, 6)))
            problem = random_problem(rng, items, formats, stages, rng.choice([0.005, 0.02, 0.2, None]))
        solution, best = solve(problem, deterministic_time=20), highs(problem)
        if best is None or solution.objective is None:
            if best is not None or solution.objective is not None:
                raise RuntimeError(f"seed {seed}: solve says {solution.status}, HiGHS found {best}")
            found["infeasible_for_both"] += 1
            continue
        value = value_of(problem, chosen(problem, solution))
        whole = value if problem.budget.kind == "loss" else value - least(problem)
        found["optimal"] += solution.status == "optimal"
        found["largest_excess"] = max(found["largest_excess"], (value - best) / (whole or 1.0) - (solution.gap or 0.0))
    return found


def million(items: int) -> dict[str, Any]:
    """Run ``snip solve --solver greedy`` as a command on a file."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "problem.json", Path(folder) / "map.json"
        path.write_text(granular(items, 0).to_json())
        arguments = ["solve", path, "--solver", "greedy", "--out", out]
        # VmHWM, not ru_maxrss: that one starts at what this process held when it forked.
        code = "import sys; from snip_megatron.tools.cli import main; code = main(sys.argv[1:]); "
        code += "print(*[x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM')]); sys.exit(code)"
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - begun
        result = json.loads(out.read_text())
        size = path.stat().st_size
    gap = (result["objective"] - result["bound"]) / result["objective"]
    peak = int(done.stdout) * 1024
    return {"items": items, "file_bytes": size, "command_s": seconds, "peak_bytes": peak, "gap": gap}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of all measurements, with where they were made."""
    solve(instance(MODELS[0], 2, 0))  # loads OR-Tools and SciPy
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    sizes = f"--seeds {args.seeds} --limit {args.limit:g} --instances {args.instances} --items {args.items}"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "command": f"python -m benchmarks.quality.solver {sizes}",
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores",
        "versions": {name: version(name) for name in ("ortools", "numpy", "scipy")}
        | {"python": sys.version.split()[0]},
        "load_average_before": os.getloadavg()[0],
        "limit": args.limit,
        "solved": solved(args.seeds, args.limit),
        "load_average_after": os.getloadavg()[0],
        "agreement": agreement(args.instances),
        "million": million(args.items),
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a result."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# Solver: time to a certified gap of 1e-4",
        "",
        f"{result['date']}, commit `{result['commit'][:12]}`, {result['hardware']}, {versions}.",
        f"`{result['command']}`; load average {result['load_average_before']:.1f} before,"
        f" {result['load_average_after']:.1f} after.",
        "Seeds 0 … n−1; instances: `benchmarks/quality/solver_instances.py`. Processor seconds are the process's own.",
        "",
        "| instances | n | optimal | gap median, max | processor s median, max | wall s median, max |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["solved"]:
        gap, *times = (row[name] for name in ("gap", "processor_s", "wall_s"))
        cells = [f"{statistics.median(t):.2f}, {max(t):.2f}" for t in times]
        cells = [row["family"], len(gap), row["optimal"], f"{statistics.median(gap):.1e}, {max(gap):.1e}", *cells]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    a, m = result["agreement"], result["million"]
    lines += [
        "",
        f"**Against HiGHS** (SciPy `milp`, gap 0): {a['instances']} random problems, {a['optimal']} with a gap of at"
        f" most 1e-4, {a['infeasible_for_both']} infeasible for both; the distance from HiGHS' value exceeds the"
        f" certified gap by at most {a['largest_excess']:.1e}.",
        "",
        f"**A million items, `--solver greedy`**: {m['items']:,} items, 3 formats, 8 stages, a file of"
        f" {m['file_bytes'] / 1e6:.0f} MB: {m['command_s']:.1f} s in all, peak memory {m['peak_bytes'] / 2**30:.2f}"
        f" GiB, gap {m['gap']:.1e}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and write the result, or print the tables of an earlier one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=2.0, help="deterministic seconds of a solve")
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path, metavar="RESULT.json", help="print the tables of a result")
    args = parser.parse_args()
    if args.markdown is not None:
        print(markdown(json.loads(args.markdown.read_text())), end="")
        return
    result = measure(args)
    if args.out is not None:
        write(args.out, result)
    print(markdown(result), end="")


if __name__ == "__main__":
    main()
