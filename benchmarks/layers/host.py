"""Host time of one linear's forward and backward: SNIP in Python and replayed in C++, bf16, Transformer Engine.

    python -m benchmarks.layers.host --out results/layers/F.json [--rounds 15] [--commit SHA]

The linear is so small (256 tokens, 1024→1024) that the host bounds it. Contenders take turns, in another order every
round. A figure is the median over rounds of the microseconds that the launching thread takes for one microbatch, of 20
between two synchronisations. The backward runs in that thread, as in a training under SNIP. A weight is quantised once
in the 20 microbatches. ``replays`` counts the calls that C++ replayed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import header, host_milliseconds, refuse_without_cuda, write
from benchmarks.layers.contenders import Contender, Problem, Snip, bf16_contenders, transformer_engine_contenders
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.precision import Format

FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)
MICROBATCHES = 20
TOKENS, WIDTH = 256, 1024


def contenders(problem: Problem, library: str) -> tuple[dict[str, Contender], GemmBackend]:
    """Return the contenders by name, and the backend whose calls C++ repeats if the extension is built."""
    contenders: dict[str, Contender] = {}
    python = copy.copy(select_backend("hopper", library=library, checks=False).backend)  # before C++ takes its methods
    backend = select_backend("hopper", library=library).backend
    for fmt in FORMATS:
        contenders[f"snip {fmt.value} Python"] = Snip(problem, python, (fmt,) * 3)
        if backend.replayed:
            contenders[f"snip {fmt.value} C++"] = Snip(problem, backend, (fmt,) * 3)
    return contenders | bf16_contenders(problem) | transformer_engine_contenders(problem), backend


def step(contender: Any) -> None:
    """Run the microbatches of a step."""
    if isinstance(contender, Snip):
        contender.handle.state.backwards = 0
        contender.handle.state.weights.clear()
    for index in range(MICROBATCHES):
        contender.microbatch(index)


def working(contenders: dict[str, Contender], failed: dict[str, str]) -> dict[str, Contender]:
    """Return the contenders that run. The reasons of the others are added to ``failed``."""
    runnable = {}
    for name, contender in contenders.items():
        try:
            for _ in range(4):
                step(contender)
            torch.cuda.synchronize()
            runnable[name] = contender
        except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
            failed[name] = f"{type(error).__name__}: {error}"[:500]
    return runnable


def measure(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Return the figures of every round by name."""
    order, shuffler = list(contenders.items()), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name, contender in order:
            times[name].append(1e3 * host_milliseconds(functools.partial(step, contender), 1) / MICROBATCHES)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="Host time of a quantised linear")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--library", default="auto", help="--snip-settings gemm_library")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    refuse_without_cuda()
    problem = Problem.draw(TOKENS, WIDTH, WIDTH)
    candidates, backend = contenders(problem, arguments.library)
    result = header(arguments.commit) | {
        "tokens": TOKENS, "n": WIDTH, "k": WIDTH, "microbatches": MICROBATCHES, "rounds": arguments.rounds,
        "selection": select_backend("hopper", library=arguments.library).reason, "failed": {},
    }  # fmt: skip
    with torch.autograd.set_multithreading_enabled(False):
        times = measure(working(candidates, result["failed"]), arguments.rounds)
    result["host_us"] = {name: statistics.median(each) for name, each in times.items()}
    result["fastest_us"] = {name: min(each) for name, each in times.items()}
    result["replays"] = {name: each.replays for name, each in backend.replayed.items()}
    for name, taken in sorted(result["host_us"].items(), key=lambda pair: pair[1]):
        print(f"{taken:8.1f} µs (fastest {result['fastest_us'][name]:.1f})  {name}")
    print(f"replays {result['replays']}  {result['selection']}")
    for name, reason in result["failed"].items():
        print(f"FAILED {name}: {reason}")
    write(arguments.out, result)
    return 1 if result["failed"] or not result["replays"] else 0


if __name__ == "__main__":
    sys.exit(main())
