"""Benchmark of ``solve_phased``: time to a proven optimum at 70B over four phases, agreement with HiGHS.

python benchmarks/solver_phased.py --out benchmarks/solver_phased_2cpu_2026-11-22.json
python benchmarks/solver_phased.py --markdown benchmarks/solver_phased_2cpu_2026-11-22.json
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
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from solver.phased_oracles import highs, random_phased  # noqa: E402
from solver_instances import MODELS, instance  # noqa: E402

from snip_megatron.sensitivity import carried_weights  # noqa: E402
from snip_megatron.solver.phased import Phase, PhasedChoice, PhasedItem, PhasedProblem, solve_phased  # noqa: E402

STEPS = (250, 125, 75, 50)
STANDING = 0.8
STRUCTURES = {
    "run": "losses as a run has them: κ · q of a falling learning rate, a standing part of fprops in the last phase",
    "bf16": "κ · q alone: deployed in bf16",
    "independent": "every loss of every phase with a factor of its own (log-normal, σ 1)",
    "equal": "a constant learning rate, deployed in bf16: all phases alike",
}


def phased_instance(structure: str, seed: int) -> PhasedProblem:
    """Return a problem of 70B: 960 items, bf16, fp8 and fp4, 8 stages, four phases."""
    static = instance(MODELS[0], 3, seed)
    begins = [sum(STEPS[:p]) for p in range(len(STEPS))]
    cosine = [1 + math.cos(math.pi * i / 100) for i in range(101)]
    carried = carried_weights(0, begins, sum(STEPS), [1.0] if structure == "equal" else cosine)
    rng = np.random.default_rng([seed, 7])

    def losses(item: str, loss: float) -> tuple[float, ...]:
        if structure == "independent":
            return tuple(
                float(f"{loss * n / sum(STEPS) * x:.4g}") for n, x in zip(STEPS, rng.lognormal(0, 1, 4), strict=True)
            )
        share = STANDING if structure == "run" and item.endswith(":fprop") else 0.0
        stands = (0.0, 0.0, 0.0, 1.0)
        return tuple(loss * (share * s + (1 - share) * c) for s, c in zip(stands, carried, strict=True))

    items = tuple(
        PhasedItem(
            i.id, i.stage, i.cost, tuple(PhasedChoice(c.format, c.saving, losses(i.id, c.loss)) for c in i.choices)
        )
        for i in static.items
    )
    return PhasedProblem(static.budget, tuple(Phase(n) for n in STEPS), items)


def proven(structure: str, seeds: int, limit: float) -> dict[str, Any]:
    """Return the wall-clock and processor seconds of ``solve_phased`` over seeds."""
    wall, processor, optimal, gap = [], [], 0, 0.0
    for seed in range(seeds):
        problem = phased_instance(structure, seed)
        begun = time.process_time()
        solution = solve_phased(problem, deterministic_time=limit)
        processor.append(time.process_time() - begun)
        wall.append(solution.solve_seconds)
        optimal += solution.status == "optimal"
        gap = max(gap, solution.gap or 0.0)
        print(structure, seed, solution.status, f"{processor[-1]:.2f} processor s", file=sys.stderr, flush=True)
    return {
        "structure": structure,
        "items": 960,
        "formats": 3,
        "phases": len(STEPS),
        "stages": 8,
        "instances": seeds,
        "optimal": optimal,
        "largest_gap": gap,
        "wall_s": wall,
        "processor_s": processor,
    }


def agreement(instances: int, limit: float, seconds: float) -> dict[str, Any]:
    """Compare objectives with HiGHS on random problems of 10 to 39 items, 2 to 4 formats, 1 to 4 stages, 2 to 4 phases.

    ``instances`` of the result counts those that were started within ``seconds``.
    """
    deadline, done = time.perf_counter() + seconds, 0
    found = {"optimal": 0, "infeasible_for_both": 0, "equal": 0, "worse": 0, "better": 0, "highs_missed_a_need": 0}
    worst, processor = 0.0, []
    for seed in range(instances):
        if time.perf_counter() > deadline:
            break
        done += 1
        rng = np.random.default_rng([seed, 2])
        items, formats, stages, phases = (int(rng.integers(a, b)) for a, b in ((10, 40), (2, 5), (1, 5), (2, 5)))
        problem = random_phased(
            rng,
            items,
            formats,
            stages,
            phases,
            kind="speedup" if seed % 3 == 2 else "target",
            tolerance=rng.choice([0.02, 0.1, None]),
            proportional=seed % 2 == 0,
        )
        begun = time.process_time()
        solution = solve_phased(problem, deterministic_time=limit)
        processor.append(time.process_time() - begun)
        best = highs(problem)
        if best is None or solution.objective is None:
            if best is not None or solution.objective is not None:
                raise RuntimeError(f"seed {seed}: solve_phased says {solution.status}, HiGHS found {best}")
            found["infeasible_for_both"] += 1
            continue
        found["optimal"] += solution.status == "optimal"
        loss, met = best
        difference = (solution.objective - loss) / max(abs(loss), 1e-300)
        if not met:
            found["highs_missed_a_need"] += 1
            continue
        found["worse" if difference > 1e-12 else "better" if difference < -1e-12 else "equal"] += 1
        worst = max(worst, abs(difference))
        print("HiGHS", seed, f"{difference:.1e}", file=sys.stderr, flush=True)
    return {
        "instances": done,
        **found,
        "largest_relative_difference": worst,
        "processor_s": math.fsum(processor),
        "slowest_s": max(processor, default=0.0),
    }


def measure(seeds: int, instances: int, limit: float, agreement_limit: float, seconds: float) -> dict[str, Any]:
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    solve_phased(phased_instance("run", 0), deterministic_time=limit)  # loads OR-Tools and SciPy
    before = os.getloadavg()[0]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "command": f"python benchmarks/solver_phased.py --seeds {seeds} --instances {instances} --limit {limit:g}"
        f" --agreement-limit {agreement_limit:g}"
        + (f" --agreement-seconds {seconds:g}" if math.isfinite(seconds) else ""),
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores",
        "versions": {name: version(name) for name in ("ortools", "numpy", "scipy")}
        | {"python": sys.version.split()[0]},
        "deterministic_limit": limit,
        "agreement_limit": agreement_limit,
        "load_average_before": before,
        "proven": [proven(structure, seeds, limit) for structure in STRUCTURES],
        "agreement": agreement(instances, agreement_limit, seconds),
        "load_average_after": os.getloadavg()[0],
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a result."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# Solver over phases: time to a proven optimum",
        "",
        f"{result['date']}, commit `{result['commit'][:12]}`, {result['hardware']}, {versions}.",
        f"`{result['command']}`; load average {result['load_average_before']:.1f} before,"
        f" {result['load_average_after']:.1f} after: wall times are those of a busy machine.",
        f"70B, 960 items × 3 formats × 4 phases of {', '.join(map(str, STEPS))} steps, 8 stages, tolerance .02;",
        f"seeds 0 … n−1; at most {result['deterministic_limit']:g} deterministic seconds each. Processor seconds are",
        "the process's own.",
        "",
        "| losses | instances | proven | largest gap | processor median, max (s) | wall median, max (s) |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["proven"]:
        times = [f"{statistics.median(row[k]):.2f}, {max(row[k]):.2f}" for k in ("processor_s", "wall_s")]
        head = [row["structure"], row["instances"], row["optimal"], f"{row['largest_gap']:.1e}"]
        lines.append("| " + " | ".join(map(str, [*head, *times])) + " |")
    a = result["agreement"]
    lines += [
        "",
        *(f"- `{name}`: {text}" for name, text in STRUCTURES.items()),
        "",
        "## Against HiGHS",
        "",
        f"{a['instances']} random problems (SciPy `milp`, gap 0, its choices evaluated again in float64):"
        f" {a['optimal']} proven optimal, {a['equal']} equal, {a['better']} better and {a['worse']} worse than HiGHS,"
        f" {a['infeasible_for_both']} infeasible for both, {a['highs_missed_a_need']} where HiGHS' choices miss a need"
        f" in float64; largest relative difference {a['largest_relative_difference']:.1e}; {a['processor_s']:.0f}"
        f" processor s for all, at most {a['slowest_s']:.1f} for one;"
        f" at most {result['agreement_limit']:g} deterministic seconds each.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--limit", type=float, default=10.0, help="deterministic seconds of a solve")
    parser.add_argument("--agreement-limit", type=float, default=60.0, help="of a solve that is compared with HiGHS'")
    parser.add_argument("--agreement-seconds", type=float, default=math.inf, help="begin no instance after these")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path, metavar="RESULT.json", help="print the tables of a result")
    args = parser.parse_args()
    if args.markdown is not None:
        print(markdown(json.loads(args.markdown.read_text())), end="")
        return
    result = measure(args.seeds, args.instances, args.limit, args.agreement_limit, args.agreement_seconds)
    if args.out is not None:
        args.out.write_text(json.dumps(result) + "\n")
    print(markdown(result), end="")


if __name__ == "__main__":
    main()
