"""One linear with forward, backward and all quantisation, against bf16 and Transformer Engine: accuracy and speed.

    python -m benchmarks.layers.linear --out results/layers/F.json [--profile 2] [--commit SHA]

The weights K→N are those of Llama-like models, with M tokens per microbatch and four microbatches per quantisation of
the weight. Every contender accumulates the weight gradient into FP32. bf16 is the fastest of several ways, which each
row names. The result is written after every row, so that a run that is stopped keeps its rows. The exit code is 1 if a
figure is out of bounds.

``geomean`` is format → speedup over bf16, over all rows. ``geomean_te`` is the same for Transformer Engine's recipe of
the same scaling (block for fp8, current for fp8_tensor).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import geomean, header, host_milliseconds, interleaved, refuse_without_cuda, write
from benchmarks.layers.accuracy import BOUNDS, gemm_errors, sqnr, violations
from benchmarks.layers.contenders import (
    MICROBATCHES,
    Contender,
    Problem,
    Snip,
    bf16_contenders,
    has_transformer_engine,
    transformer_engine_contenders,
)
from benchmarks.layers.parts import copy_bandwidth, measure_parts
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.precision import Format

FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)
WEIGHTS = (  # K, N
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096),
    (8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192),
)  # fmt: skip
TOKENS = (8192, 16384)


def working(problem: Problem, contenders: dict[str, Contender], row: dict[str, Any]) -> dict[str, Contender]:
    """Return the contenders that run.

    Their signal-to-noise ratios, and the reasons of the others, are added to ``row``.
    """
    running = {}
    for name, contender in contenders.items():
        try:
            row["sqnr_db"][name] = sqnr(problem, contender)
            running[name] = contender
        except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
            row["failed"][name] = f"{type(error).__name__}: {error}"[:500]
    return running


def measure(m: int, k: int, n: int, backend: GemmBackend, rounds: int) -> dict[str, Any]:
    """Measure one row: accuracy of every contender, then their times in turns, then those of the parts of SNIP's."""
    problem = Problem.draw(m, n, k)
    row: dict[str, Any] = {"m": m, "k": k, "n": n, "sqnr_db": {}, "failed": {}}
    contenders = {f"snip {f.value}": Snip(problem, backend, (f, f, f)) for f in FORMATS}
    contenders |= transformer_engine_contenders(problem) | bf16_contenders(problem)
    calls = {name: contender.step for name, contender in working(problem, contenders, row).items()}
    row["gemm_error"] = {fmt.value: gemm_errors(problem, backend, fmt) for fmt in FORMATS}
    row["violations"] = violations(row)
    times = {name: t / MICROBATCHES for name, t in interleaved(calls, rounds).items()}
    fastest = min((name for name in times if name.startswith("bf16 ")), key=times.__getitem__)
    row |= {"ms": times, "bf16": fastest.removeprefix("bf16 "), "bf16_ms": times[fastest]}
    for key, prefix in (("speedup", "snip "), ("speedup_te", "te ")):
        row[key] = {n.removeprefix(prefix): times[fastest] / t for n, t in times.items() if n.startswith(prefix)}
    row["host_ms"] = {name: host_milliseconds(call, 3) / MICROBATCHES for name, call in calls.items()}
    row["parts"] = {fmt.value: measure_parts(problem, backend, fmt) for fmt in FORMATS}
    return row


def show(row: dict[str, Any]) -> None:
    ours = " ".join(f"{name} {value:.3f}" for name, value in row["speedup"].items())
    theirs = " ".join(f"{name} {value:.3f}" for name, value in row["speedup_te"].items())
    shape = f"{row['k']:6d}→{row['n']:<6d} M {row['m']:6d}"
    print(f"{shape}  bf16 {row['bf16_ms']:8.3f} ms ({row['bf16']})  ours {ours}  TE {theirs}")
    for line in row["violations"]:
        print(f"  OUT OF BOUNDS {line}")
    for name, reason in row["failed"].items():
        print(f"  FAILED {name}: {reason}")
    sys.stdout.flush()


def summarise(result: dict[str, Any]) -> None:
    """Compute the geometric means over the rows measured so far."""
    rows = result["rows"]
    for key, column in (("geomean", "speedup"), ("geomean_te", "speedup_te")):
        names = [f.value for f in FORMATS if all(f.value in row[column] for row in rows)]
        result[key] = {name: geomean([row[column][name] for row in rows]) for name in names}
    quantisations = [(f"{name} {fmt} {row['k']}→{row['n']} M {row['m']}", part["of_copy"])
                     for row in rows for fmt, parts in row["parts"].items()
                     for name, part in parts.items() if "of_copy" in part]  # fmt: skip
    result["slowest_quantisations_of_copy"] = dict(sorted(quantisations, key=lambda pair: pair[1])[:12])
    result["complete"] = len(rows) == len(WEIGHTS) * len(TOKENS)


def measure_all(result: dict[str, Any], backend: GemmBackend, arguments: argparse.Namespace, deadline: float) -> None:
    for m in TOKENS:
        for k, n in WEIGHTS:
            if time.monotonic() > deadline:
                print(f"out of time before {k}→{n} at {m}: the result is incomplete")
                return
            row = measure(m, k, n, backend, arguments.rounds)
            gc.collect()
            torch.cuda.empty_cache()
            result["rows"].append(row)
            show(row)
            summarise(result)
            write(arguments.out, result)


def profile(result: dict[str, Any], backend: GemmBackend, count: int) -> str:
    """Return torch's profile of one step of the rows that gain least, for SNIP and for the others."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    text = []
    for row in sorted(result["rows"], key=lambda row: float(row["speedup"]["fp8"]))[:count]:
        problem = Problem.draw(row["m"], row["n"], row["k"])
        contenders = {f"snip {f.value}": Snip(problem, backend, (f, f, f)) for f in FORMATS}
        contenders |= transformer_engine_contenders(problem)
        for name, contender in contenders.items():
            contender.step()
            torch.cuda.synchronize()
            with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
                contender.step()
                torch.cuda.synchronize()
            table = run.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=70)
            text.append(
                f"== {name}: {row['k']}→{row['n']}, M {row['m']}, one step of {MICROBATCHES} microbatches\n{table}"
            )
    return "\n".join(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed and numbers of a quantised linear")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of every contender a row")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no further row after this time")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="profile the rows that gain least")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    refuse_without_cuda()
    deadline = time.monotonic() + arguments.seconds
    selection = select_backend("hopper")
    result = header(arguments.commit) | {
        "backend": selection.backend.name,
        "microbatches_a_weight_quantisation": MICROBATCHES,
        "rounds": arguments.rounds,
        "transformer_engine": has_transformer_engine(),
        "bounds": BOUNDS,
        "copy_tb_s": copy_bandwidth() / 1e12,
        "rows": [],
    }
    if not has_transformer_engine():
        print("transformer_engine cannot be imported: its contenders are left out")
    measure_all(result, selection.backend, arguments, deadline)
    if arguments.profile:
        text = profile(result, selection.backend, arguments.profile)
        print(text)
        if arguments.out is not None:
            arguments.out.with_suffix(".profile.txt").write_text(text + "\n")
    print(f"geomean {result.get('geomean')}\ngeomean of Transformer Engine {result.get('geomean_te')}")
    write(arguments.out, result)
    return 1 if any(row["violations"] or row["failed"] for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
