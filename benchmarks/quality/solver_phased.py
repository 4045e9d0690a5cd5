"""Benchmark of ``solve_phased``: time to a proven optimum at 70B over four phases, agreement with HiGHS.

python -m benchmarks.quality.solver_phased --seeds 20 --limit 2 --out F.json
python -m benchmarks.quality.solver_phased --markdown F.json
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.quality.solver_common import ROOT, median_and_most, origin, origin_lines, proofs, run

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from solver.phased_oracles import highs, random_of_seed  # noqa: E402

from benchmarks.quality.solver_instances import MODELS, instance  # noqa: E402
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
    """Solve instances of ``structure``."""
    problems = (phased_instance(structure, seed) for seed in range(seeds))
    return {
        "structure": structure,
        "items": 960,
        "formats": 3,
        "phases": len(STEPS),
        "stages": 8,
        **proofs(lambda problem: solve_phased(problem, deterministic_time=limit), problems, structure),
    }


def agreement(instances: int, limit: float, seconds: float) -> dict[str, Any]:
    """Compare objectives with HiGHS on random problems (``phased_oracles.random_of_seed``).

    ``instances`` of the result counts those that were started within ``seconds``.
    """
    deadline, done = time.perf_counter() + seconds, 0
    found = {"optimal": 0, "infeasible_for_both": 0, "equal": 0, "worse": 0, "better": 0, "highs_missed_a_need": 0}
    worst, processor = 0.0, []
    for seed in range(instances):
        if time.perf_counter() > deadline:
            break
        done += 1
        problem = random_of_seed(seed)
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    solve_phased(phased_instance("run", 0), deterministic_time=args.limit)  # loads OR-Tools and SciPy
    command = f"python -m benchmarks.quality.solver_phased --seeds {args.seeds} --instances {args.instances}"
    command += f" --limit {args.limit:g} --agreement-limit {args.agreement_limit:g}"
    if math.isfinite(args.agreement_seconds):
        command += f" --agreement-seconds {args.agreement_seconds:g}"
    return {
        **origin(command),
        "deterministic_limit": args.limit,
        "agreement_limit": args.agreement_limit,
        "proven": [proven(structure, args.seeds, args.limit) for structure in STRUCTURES],
        "agreement": agreement(args.instances, args.agreement_limit, args.agreement_seconds),
        "load_average_after": os.getloadavg()[0],
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a result."""
    begin, load = origin_lines(result)
    lines = [
        "# Solver over phases: time to a proven optimum",
        "",
        begin,
        f"{load}.",
        f"70B, 960 items × 3 formats × 4 phases of {', '.join(map(str, STEPS))} steps, 8 stages, tolerance .02;",
        f"seeds 0 … n−1; at most {result['deterministic_limit']:g} deterministic seconds each. Processor seconds are",
        "the process's own.",
        "",
        "| losses | instances | proven | largest gap | processor median, max (s) | wall median, max (s) |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["proven"]:
        times = [median_and_most(row, name, 2) for name in ("processor_s", "wall_s")]
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
    run(parser, measure, markdown)


if __name__ == "__main__":
    main()
