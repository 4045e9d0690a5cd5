"""Benchmark of ``snip_megatron.solver``: time to a proven optimum, agreement with HiGHS, a million items.

python benchmarks/solver.py --out benchmarks/solver_70b-405b_2cpu_2026-11-21.json
python benchmarks/solver.py --markdown benchmarks/solver_70b-405b_2cpu_2026-11-21.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from solver.oracles import highs, random_problem  # noqa: E402
from solver_instances import MODELS, Model, granular, instance  # noqa: E402

from snip_megatron.solver import solve  # noqa: E402


def proven(model: Model, formats: int, seeds: int) -> dict[str, Any]:
    """Return the wall-clock and processor seconds of ``solve`` over seeds."""
    wall, processor, optimal, gap = [], [], 0, 0.0
    for seed in range(seeds):
        problem = instance(model, formats, seed)
        begun = time.process_time()
        solution = solve(problem, seed=0)
        processor.append(time.process_time() - begun)
        wall.append(solution.solve_seconds)
        optimal += solution.status == "optimal"
        gap = max(gap, solution.gap or 0.0)
    return {
        "model": model.name,
        "items": model.blocks * 12,
        "stages": model.stages,
        "formats": formats,
        "instances": seeds,
        "optimal": optimal,
        "largest_gap": gap,
        "wall_s": wall,
        "processor_s": processor,
    }


def agreement(instances: int) -> dict[str, Any]:
    """Compare objectives with HiGHS on random problems of 10 to 120 items, 2 to 6 formats, 1 to 5 stages."""
    worst, optimal, worse, infeasible = 0.0, 0, 0, 0
    for seed in range(instances):
        rng = np.random.default_rng([seed, 500])
        items, formats, stages = (int(rng.integers(a, b)) for a, b in ((10, 120), (2, 7), (1, 6)))
        problem = random_problem(rng, items, formats, stages, rng.choice([0.005, 0.02, 0.2, None]))
        solution, best = solve(problem), highs(problem)
        if best is None and solution.objective is None:
            infeasible += 1
            continue
        if best is None or solution.objective is None:
            raise RuntimeError(f"seed {seed}: solve says {solution.status}, HiGHS found {best}")
        difference = (solution.objective - best) / max(abs(best), 1e-300)
        worst, worse = max(worst, abs(difference)), worse + (difference > 1e-12)
        optimal += solution.status == "optimal"
    return {
        "instances": instances,
        "optimal": optimal,
        "infeasible_for_both": infeasible,
        "worse_than_highs": worse,
        "largest_relative_difference": worst,
    }


def million(items: int) -> dict[str, Any]:
    """Run ``snip solve --solver greedy`` as a command on a file."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "problem.json", Path(folder) / "map.json"
        path.write_text(granular(items, 0).to_json())
        arguments = ["solve", path, "--solver", "greedy", "--out", out]
        # VmHWM, not ru_maxrss: that one starts at what this process held when it forked.
        code = "import sys; from snip_megatron.cli import main; code = main(sys.argv[1:]); "
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
    return {
        "items": items,
        "file_bytes": size,
        "command_s": seconds,
        "solve_s": result["solve_seconds"],
        "peak_bytes": int(done.stdout) * 1024,
        "gap": (result["objective"] - result["bound"]) / result["objective"],
    }


def measure(seeds: int, instances: int, items: int) -> dict[str, Any]:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    solve(instance(MODELS[0], 2, 0))  # loads OR-Tools
    return {
        "date": datetime.date.today().isoformat(),
        "commit": found.stdout.strip() or "unknown",
        "command": f"python benchmarks/solver.py --seeds {seeds} --instances {instances} --items {items}",
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores",
        "load_average_before": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("ortools", "numpy", "scipy")}
        | {"python": sys.version.split()[0]},
        "proven": [proven(model, formats, seeds) for model in MODELS for formats in (2, 3, 6)],
        "load_average_after": os.getloadavg()[0],
        "agreement": agreement(instances),
        "million": million(items),
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a result."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# Solver: time to a proven optimum",
        "",
        f"{result['date']}, commit `{result['commit'][:12]}`, {result['hardware']}, {versions}.",
        f"`{result['command']}`; load average {result['load_average_before']:.1f} before, "
        f"{result['load_average_after']:.1f} after. Seeds 0 … n−1; instances: `benchmarks/solver_instances.py`.",
        "Processor seconds are the process's own, over all its threads.",
        "",
        "| model | items | stages | formats | instances | proven | wall median, max (s) | processor median, max (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["proven"]:
        times = [f"{statistics.median(row[k]):.3f}, {max(row[k]):.3f}" for k in ("wall_s", "processor_s")]
        head = [row[k] for k in ("model", "items", "stages", "formats", "instances", "optimal")]
        lines.append("| " + " | ".join(map(str, [*head, *times])) + " |")
    a, m = result["agreement"], result["million"]
    lines += [
        "",
        "## Against HiGHS",
        "",
        f"{a['instances']} random problems (SciPy `milp`, gap 0, its choice re-evaluated in float64): "
        f"{a['optimal']} proven optimal, {a['infeasible_for_both']} infeasible for both, "
        f"{a['worse_than_highs']} worse than HiGHS, largest relative difference "
        f"{a['largest_relative_difference']:.1e}.",
        "",
        "## A million items, `--solver greedy`",
        "",
        f"{m['items']:,} items, 3 formats, 8 stages, a file of {m['file_bytes'] / 1e6:.0f} MB: the command took "
        f"{m['command_s']:.1f} s in all, {m['solve_s']:.1f} s of it in the solver; peak memory "
        f"{m['peak_bytes'] / 2**30:.2f} GiB; gap {math.ceil(m['gap'] * 1e8) / 1e6:g} %.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path, metavar="RESULT.json", help="print the tables of a result")
    args = parser.parse_args()
    if args.markdown is not None:
        print(markdown(json.loads(args.markdown.read_text())), end="")
        return
    result = measure(args.seeds, args.instances, args.items)
    if args.out is not None:
        args.out.write_text(json.dumps(result) + "\n")
    print(markdown(result), end="")


if __name__ == "__main__":
    main()
