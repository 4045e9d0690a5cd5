"""Benchmark of ``snip_megatron.solver``: time to a proven optimum, agreement with HiGHS, a million items.

python -m benchmarks.quality.solver --out benchmarks/results/solver/solver_70b-405b_2cpu_2026-11-21.json
python -m benchmarks.quality.solver --markdown benchmarks/results/solver/solver_70b-405b_2cpu_2026-11-21.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.solver_common import ROOT, median_and_most, origin, origin_lines, proofs, run

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from solver.oracles import highs, random_problem  # noqa: E402

from benchmarks.quality.solver_instances import MODELS, Model, granular, instance  # noqa: E402
from snip_megatron.solver import solve  # noqa: E402


def proven(model: Model, formats: int, seeds: int) -> dict[str, Any]:
    """Solve instances of ``model``."""
    problems = (instance(model, formats, seed) for seed in range(seeds))
    return {
        "model": model.name,
        "items": model.blocks * 12,
        "stages": model.stages,
        "formats": formats,
        **proofs(lambda problem: solve(problem, seed=0), problems, f"{model.name} {formats}"),
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    solve(instance(MODELS[0], 2, 0))  # loads OR-Tools
    sizes = f"--seeds {args.seeds} --instances {args.instances} --items {args.items}"
    return {
        **origin(f"python -m benchmarks.quality.solver {sizes}"),
        "proven": [proven(model, formats, args.seeds) for model in MODELS for formats in (2, 3, 6)],
        "load_average_after": os.getloadavg()[0],
        "agreement": agreement(args.instances),
        "million": million(args.items),
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a result."""
    begin, load = origin_lines(result)
    lines = [
        "# Solver: time to a proven optimum",
        "",
        begin,
        f"{load}. Seeds 0 … n−1; instances: `benchmarks/quality/solver_instances.py`.",
        "Processor seconds are the process's own, over all its threads.",
        "",
        "| model | items | stages | formats | instances | proven | wall median, max (s) | processor median, max (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["proven"]:
        times = [median_and_most(row, name, 3) for name in ("wall_s", "processor_s")]
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
    run(parser, measure, markdown)


if __name__ == "__main__":
    main()
