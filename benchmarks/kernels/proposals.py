"""Measures cuBLASLt's proposals for GEMMs with one scale per tensor, the table ``numerics/products/proposals.json``.

    python -m benchmarks.kernels.proposals --out numerics/products/proposals.json [--seconds 120] [--commit SHA]

The shapes are those of ``linear.py``, for fprop and dgrad. A proposal other than the first enters the table if it was
faster than the first by 2 % or more in two measurements, if its result agrees with the first's to bf16, and if it is
bitwise repeatable.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import header, interleaved, refuse_without_cuda, write
from benchmarks.layers.linear import TOKENS, WEIGHTS
from snip_megatron.numerics.products.cublaslt import CublasLt, CublasLtError, cublaslt
from snip_megatron.numerics.quantize.kernels import quantize as triton_quantize
from snip_megatron.numerics.quantize.operands import Operand, OperandSpec
from snip_megatron.precision import Format

PROPOSALS = 8
GAIN = 1.02
ROUNDS = 16
DIFFERENCE = 1e-2  # of two products in fast accumulation, each rounded to bf16


def operand(rows: int, depth: int) -> Operand:
    generator = torch.Generator(device="cuda").manual_seed(rows + depth)
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16, generator=generator)
    row: Operand = triton_quantize.quantize_operands(x, OperandSpec(Format.FP8_TENSOR, None))[0]
    return row


def runnable(library: CublasLt, a: Operand, b: Operand) -> dict[int, Callable[[], object]]:
    """Return number → call of the proposals that run, are bitwise repeatable and agree with the first one."""
    calls: dict[int, Callable[[], bool]] = {}
    reference: torch.Tensor | None = None
    for choice in range(PROPOSALS):
        multiply = functools.partial(library.multiply, a, b, torch.bfloat16, fast=True, choice=choice)
        try:
            first, second = multiply(), multiply()
        except CublasLtError:
            continue
        if first is None or second is None:
            break
        reference = first if reference is None else reference
        difference = (first.float() - reference.float()).norm() / reference.float().norm()
        if torch.equal(first, second) and difference <= DIFFERENCE:
            calls[choice] = multiply
    return calls


def measure(library: CublasLt, a_rows: int, b_rows: int, depth: int) -> dict[str, Any]:
    """Return the fastest proposal of one GEMM, and its gain, the smaller of two measurements; 0: the first proposal."""
    calls = runnable(library, operand(a_rows, depth), operand(b_rows, depth))
    first, second = (
        interleaved({str(choice): call for choice, call in calls.items()}, ROUNDS, head_start=True) for _ in range(2)
    )
    best = min(first, key=first.__getitem__)
    gain = min(times["0"] / times[best] for times in (first, second))
    flops = 2.0 * a_rows * b_rows * depth
    return {
        "a_rows": a_rows, "b_rows": b_rows, "depth": depth, "choice": int(best) if gain >= GAIN else 0, "gain": gain,
        "tflop_s": {choice: flops / ms / 1e9 for choice, ms in second.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures cuBLASLt's proposals for products with one scale a tensor")
    parser.add_argument("--out", type=Path, help="table (JSON)")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no further product after this time")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    refuse_without_cuda()
    library = cublaslt()
    if library is None:
        print("proposals.py: torch's cuBLASLt cannot be bound", file=sys.stderr)
        return 2
    shapes = {(m, n, k) for m in TOKENS for pair in WEIGHTS for k, n in (pair, pair[::-1])}
    result = header(arguments.commit) | {"cublaslt": library.version, "rows": []}
    deadline = time.monotonic() + arguments.seconds
    for shape in sorted(shapes, key=lambda sizes: (sizes[0] * sizes[1] * sizes[2], sizes)):
        if time.monotonic() > deadline:
            print(f"out of time before {shape}")
            break
        row = measure(library, *shape)
        torch.cuda.empty_cache()
        speeds = " ".join(f"#{choice} {speed:.0f}" for choice, speed in row["tflop_s"].items())
        print(f"{shape}: #{row['choice']}, gain {row['gain']:.3f}  TFLOP/s {speeds}", flush=True)
        if row["choice"]:
            result["rows"].append(row)
        write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
