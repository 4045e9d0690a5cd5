"""SwiGLU and its gradient fused with quantisation, against Megatron's functions and a quantisation after them.

    python -m benchmarks.kernels.swiglu --out results/kernels/F.json [--sweep] [--commit SHA]

A row is a function, a format of both operands and a shape [tokens, features of the MLP]. ``unfused_ms`` and
``fused_ms`` are GPU times with a cold L2 cache, without the time of launches; ``*_host_us`` is how long a call occupies
the launching thread. ``same_db`` is the smallest ratio, in decibels, of an unfused operand to its difference from the
fused one. The exit code is 1 if one is below 60. ``--sweep`` also tries other launch options. In fp8_tensor the fused
function returns bf16 and its amax, and the quantisation follows it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import cold_milliseconds, header, host_milliseconds, refuse_without_cuda, write
from snip_megatron.megatron.linears import STOCK
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize.kernels.swiglu import LAUNCH
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandPair, OperandSpec
from snip_megatron.precision import Format

SHAPES = ((16384, 5632), (8192, 14336), (8192, 28672))  # of Llamas of 1 B, 8 B and 70 B
FORMATS = (Format.FP8, Format.FP4, Format.FP8_TENSOR)
SWEEP = [
    {"num_warps": warps, "maxnreg": registers}
    for warps in (4, 8, 16)
    for registers in (40, 48, 64, 80, 96, 128, 168)
    if 32 * warps * registers <= 65536  # of a multiprocessor
]
Call = Callable[[], OperandPair]


def calls(backend: GemmBackend, shape: tuple[int, int], fmt: Format) -> dict[str, tuple[Call, Call]]:
    """Return function → (unfused, fused) calls. fp4 gradients round stochastically, as in training."""
    tokens, features = shape
    generator = torch.Generator(device="cuda").manual_seed(0)
    y = torch.randn(tokens, 2 * features, device="cuda", generator=generator).bfloat16()
    d = (torch.randn(tokens, features, device="cuda", generator=generator) * 1e-3).bfloat16()
    seeds = (2**63 + 11, 12) if fmt is Format.FP4 else (None, None)
    keys = GradientKeys(*seeds, torch.arange(2 * features, device="cuda"), paired=True)

    def with_amax() -> OperandPair:
        x, amax = backend.swiglu(y, None, None)
        return backend.quantize(x, OperandSpec(fmt, fmt, amax=amax))

    def gradient_with_amax() -> OperandPair:
        g, amax = backend.swiglu(y, d, None)
        return backend.quantize(g, OperandSpec(fmt, fmt, keys=keys, amax=amax))

    unfused = (
        lambda: backend.quantize(STOCK.forward(y), OperandSpec(fmt, fmt)),
        lambda: backend.quantize(STOCK.backward(d, y), OperandSpec(fmt, fmt, keys=keys)),
    )
    if fmt is Format.FP8_TENSOR:
        return {"swiglu": (unfused[0], with_amax), "gradient": (unfused[1], gradient_with_amax)}
    return {
        "swiglu": (unfused[0], lambda: backend.swiglu(y, None, OperandSpec(fmt, fmt))),
        "gradient": (unfused[1], lambda: backend.swiglu(y, d, OperandSpec(fmt, fmt, keys=keys))),
    }


def same(actual: OperandPair, other: OperandPair) -> float:
    """Return the smallest ratio of operands to their difference in decibels, at most 300."""
    pairs = [(a.dequantize().double(), b.dequantize().double()) for a, b in zip(actual, other, strict=True)]
    return min(float(20 * torch.log10(a.norm() / (b - a).norm().clamp(min=1e-300))) for a, b in pairs)


def measure(backend: GemmBackend, *, sweep: bool) -> list[dict[str, Any]]:
    """Return the rows."""
    rows = []
    for shape in SHAPES:
        torch.compiler.reset()  # one shape for each compilation, as in a training
        for fmt in FORMATS:
            for name, (unfused, fused) in calls(backend, shape, fmt).items():
                row: dict[str, Any] = {"function": name, "format": fmt.value, "shape": list(shape)}
                row["same_db"] = min(same(unfused(), fused()), 300.0)
                for which, call in (("unfused", unfused), ("fused", fused)):
                    row[f"{which}_ms"] = cold_milliseconds(call)
                    row[f"{which}_host_us"] = 1e3 * host_milliseconds(call)
                if sweep:
                    unreplayed = calls(getattr(backend, "python", backend), shape, fmt)[name][1]
                    row["sweep"] = swept(f"{name}, amax" if fmt is Format.FP8_TENSOR else name, unreplayed)
                rows.append(row)
                print(row, flush=True)
    return rows


def swept(name: str, call: Call) -> dict[str, float]:
    """Return launch options → GPU milliseconds of the fused function, which is not replayed: a replay keeps its own."""
    usual, times = LAUNCH[name], {}
    for options in SWEEP:
        LAUNCH[name] = options
        times[f"{options['num_warps']} warps, {options['maxnreg']} registers"] = cold_milliseconds(call)
    LAUNCH[name] = usual
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="SwiGLU fused with quantisation: bits and speed")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--sweep", action="store_true", help="try other launch options")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    refuse_without_cuda()
    backend = select_backend("hopper").backend
    result = header(arguments.commit) | {"rows": measure(backend, sweep=arguments.sweep)}
    write(arguments.out, result)
    return 1 if any(row["same_db"] < 60 for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
