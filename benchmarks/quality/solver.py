"""Benchmark of ``snip_megatron.solver``: time to a certified gap, agreement with HiGHS, a million items.

python -m benchmarks.quality.solver --out F.json
python -m benchmarks.quality.solver --markdown F.json
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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from solver.oracles import chosen, highs, least, phased_of_seed, random_problem, value_of  # noqa: E402

from benchmarks.common import write  # noqa: E402
from snip_megatron.precision import DENSE_LAYER, Format, Gemm  # noqa: E402
from snip_megatron.precision.budget import Budget  # noqa: E402
from snip_megatron.sensitivity.request import carried_weights  # noqa: E402
from snip_megatron.solver import Choice, Item, Phase, Problem, solve  # noqa: E402

SPEEDUP = 1.35
Named = Iterator[tuple[str, Problem]]


TOKENS = 4e6  # of a step
TOLERANCE = 0.02
SPEEDUPS = {
    Format.BF16: 1.0,
    Format.FP8: 1.4,
    Format.FP4: 1.9,
    Format.FP8_TENSOR: 1.65,
    Format.NVFP4: 2.4,
    Format.MXFP4: 2.2,
}
"""Typical speed of a GEMM relative to BF16. Every (linear kind, GEMM, format) has its own, which varies by 12 %."""
LOSSES = {
    Format.BF16: 0.0,
    Format.FP8: 0.02,
    Format.FP4: 1.0,
    Format.FP8_TENSOR: 0.05,
    Format.NVFP4: 0.5,
    Format.MXFP4: 0.8,
}
CANDIDATES = {
    2: (Format.FP8, Format.FP4),
    3: (Format.BF16, Format.FP8, Format.FP4),
    6: (Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4, Format.MXFP4),
}


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama, and its pipeline."""

    name: str
    blocks: int
    stages: int
    hidden: int
    ffn: int
    kv_share: float

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(n, k) of the four linears."""
        h = self.hidden
        return (int(h * (1 + 2 * self.kv_share)), h), (h, h), (2 * self.ffn, h), (h, self.ffn)


MODELS = (Model("70b", 80, 8, 8192, 28672, 1 / 8), Model("405b", 126, 16, 16384, 53248, 1 / 16))


def instance(model: Model, formats: int, seed: int) -> Problem:
    """Return one problem at granularity ``gemm``.

    Losses are heavy-tailed (log-normal over four decades), larger for fprop, fc2 and the first and last blocks, and
    rounded to four digits as in a run. With two formats, costs are FLOPs and the target is 75 % in fp4. With more
    formats, costs are seconds and the target is three quarters of what the fastest formats would save.
    """
    rng = np.random.default_rng(seed)
    candidates = CANDIDATES[formats]
    n = model.blocks * 12
    block = np.repeat(np.arange(model.blocks), 12)
    kind = np.tile(np.repeat(np.arange(4), 3), model.blocks)
    gemm = np.tile(np.arange(3), model.blocks * 4)
    cost = np.array([2.0 * TOKENS * a * b for a, b in model.shapes()])[kind]
    share = np.tile([0.0, 1.0], (n, 1))
    target = 0.75
    if formats > 2:
        speed = np.array([SPEEDUPS[f] for f in candidates]) * np.exp(rng.normal(0, 0.12, (4, 3, formats)))
        speed[..., 0] = 1.0
        share = (1 - 1 / np.maximum(speed, 1.0))[kind, gemm]
        cost = cost / 6e14 * np.exp(rng.normal(0, 0.1, (4, 3)))[kind, gemm]
        target = 0.75 * float((share.max(axis=1) * cost).sum() / cost.sum())
    depth = 1 + 0.8 * np.exp(-block / 4) + 0.5 * np.exp((block + 1 - model.blocks) / 4)
    weight = np.array([1, 0.6, 1.5, 2.5])[kind] * np.array([10, 3, 1])[gemm] * depth
    loss = 1e-5 * weight * np.exp(rng.normal(0, 1.5, n))
    losses = loss[:, None] * np.array([LOSSES[f] for f in candidates]) * np.exp(rng.normal(0, 0.3, (n, formats)))
    items = tuple(
        Item(
            id=f"decoder.layers.{block[i]}.{DENSE_LAYER[kind[i]]}:{list(Gemm)[gemm[i]].value}",
            stage=int(block[i] * model.stages // model.blocks),
            cost=float(cost[i]),
            choices=tuple(
                Choice(f, (float(f"{losses[i, j]:.4g}"),), float(share[i, j] * cost[i]))
                for j, f in enumerate(candidates)
            ),
        )
        for i in range(n)
    )
    return Problem(Budget("fp4", target), items, stage_tolerance=TOLERANCE)


def granular(items: int, seed: int) -> Problem:
    """Return a problem with a choice for every block of a weight.

    It has many items with few different costs, heavy-tailed losses and eight stages.
    """
    rng = np.random.default_rng(seed)
    cost = rng.choice([5.0, 4.0, 28.0, 14.0], items) * 1e9
    loss = np.exp(rng.normal(0, 2, items))
    rows = zip(cost.tolist(), loss.tolist(), strict=True)
    return Problem(
        Budget("fp4", 0.55),
        tuple(
            Item(
                f"block.{i}",
                i * 8 // items,
                c,
                (
                    Choice(Format.BF16, (0.0,), 0.0),
                    Choice(Format.FP8, (0.02 * x,), 0.5 * c),
                    Choice(Format.FP4, (x,), 0.75 * c),
                ),
            )
            for i, (c, x) in enumerate(rows)
        ),
        stage_tolerance=TOLERANCE,
    )


STEPS = (250, 125, 75, 50)
STANDING = 0.8
STRUCTURES = {
    "run": "losses as a run has them: κ · q of a falling learning rate, a standing part of fprops in the last phase",
    "bf16": "κ · q alone: deployed in bf16",
    "independent": "every loss of every phase with a factor of its own (log-normal, σ 1)",
    "equal": "a constant learning rate, deployed in bf16: all phases alike",
}


def phased_instance(structure: str, seed: int) -> Problem:
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
        replace(i, choices=tuple(replace(c, losses=losses(i.id, c.loss)) for c in i.choices)) for i in static.items
    )
    return replace(static, items=items, phases=tuple(Phase(n) for n in STEPS))


def timed(problem: Problem, kind: str, value: float) -> Problem:
    """Return the problem with a budget of time; its costs are taken as seconds."""
    return replace(problem, budget=Budget(kind, value), stage_tolerance=None)


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
    counts: dict[str, Any] = {"instances": instances, "optimal": 0, "infeasible_for_both": 0, "largest_excess": 0.0}
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
            counts["infeasible_for_both"] += 1
            continue
        value = value_of(problem, chosen(problem, solution))
        whole = value if problem.budget.kind == "loss" else value - least(problem)
        counts["optimal"] += solution.status == "optimal"
        excess = (value - best) / (whole or 1.0) - (solution.gap or 0.0)
        counts["largest_excess"] = max(counts["largest_excess"], excess)
    return counts


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
        process = subprocess.run(
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
    peak = int(process.stdout) * 1024
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
        "Seeds 0 … n−1; instances: `benchmarks/quality/solver.py`. Processor seconds are the process's own.",
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
