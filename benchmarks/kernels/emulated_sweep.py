"""Shapes of the launches of bf16 emulation on this GPU: time of each, bits against the reference.

    python -m benchmarks.kernels.emulated_sweep --out results/kernels/F.json

Every case quantises a matrix for one GEMM with every shape of a list. The amax of the tensor is given, so that one
kernel runs. ``copy`` is the share of the bandwidth of a copy of as many bytes. A star marks the shape in use. To use
another one, edit ``SHAPES`` of ``snip_megatron/numerics/quantize/kernels/exact.py``. The exit code is 1 if a case that
rounds to nearest gives other bits than the reference.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import cold_milliseconds, header, refuse_without_cuda, write
from snip_megatron.numerics.quantize import operands as reference
from snip_megatron.numerics.quantize.kernels import exact
from snip_megatron.numerics.quantize.kernels.exact import SHAPES, Shape
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.precision import Format

SIZES = ((4096, 4096), (8192, 14336))
CHECKED = (1000, 4224)
# name → kind of launch, formats of the two operands, square blocks, stochastic rounding
CASES: dict[str, tuple[str, str | None, str | None, bool, bool]] = {
    "nvfp4 rows": ("rows", "nvfp4", None, False, False),
    "nvfp4 rows, stochastic": ("rows", "nvfp4", None, False, True),
    "nvfp4_46 rows": ("rows", "nvfp4_46", None, False, False),
    "nvfp4 columns": ("columns", None, "nvfp4", False, False),
    "nvfp4 columns, stochastic": ("columns", None, "nvfp4", False, True),
    "nvfp4 blocks": ("columns", "nvfp4", "nvfp4", True, False),
    "nvfp4_hadamard columns, stochastic": ("columns", None, "nvfp4_hadamard", False, True),
    "mxfp8 rows": ("rows", "mxfp8", None, False, False),
    "mxfp8 columns": ("columns", None, "mxfp8", False, False),
    "mxfp4 columns, stochastic": ("columns", None, "mxfp4", False, True),
    "fp4 rows": ("tiles of 128", "fp4", None, False, False),
    "fp4 columns, stochastic": ("tiles of 128", None, "fp4", False, True),
}
GRID = {
    "rows": [Shape(8, 128, 8, 2), Shape(8, 256, 8, 4), Shape(32, 128, 8, 4), Shape(16, 256, 8, 8)],
    "columns": [Shape(16, 512, 2, 8), Shape(16, 128, 2, 2), Shape(16, 128, 1, 4), Shape(16, 256, 2, 8)],
    "tiles of 128": [Shape(128, 128, 8, 16), Shape(128, 64, 8, 8), Shape(128, 128, 4, 8)],
}
Call = Callable[[Callable[..., OperandPair]], OperandPair]


def case(name: str, x: Tensor) -> Call:
    """Return a call of a quantiser on ``x``."""
    _, row, col, weight, random = CASES[name]
    formats = (None if fmt is None else Format(fmt) for fmt in (row, col))
    amax = x.abs().amax().float()
    keys = GradientKeys(2**63 + 11, 12, torch.arange(x.shape[1], device=x.device), paired=True) if random else None
    spec = OperandSpec(*formats, weight=weight, amax=amax, keys=keys, rotation=Rotation(12345, amax))
    return lambda quantize: quantize(x, spec)


def sample(rows: int, cols: int) -> Tensor:
    """Return bf16 numbers whose rows differ in size."""
    generator = torch.Generator("cuda").manual_seed(rows + cols)
    x = torch.randn(rows, cols, device="cuda", generator=generator)
    return (x * torch.rand(rows, 1, device="cuda", generator=generator).exp()).bfloat16()


def differing(actual: OperandPair, expected: OperandPair) -> int:
    """Return in how many numbers and scales two pairs of operands differ."""
    count = 0
    for operand, other in zip(actual, expected, strict=True):
        if operand is not None and other is not None:
            count += int((operand.values.view(torch.int16) != other.values.view(torch.int16)).sum())
            if operand.scale is not None and other.scale is not None:
                count += int((operand.scale != other.scale).sum())
    return count


@functools.cache
def copy_bandwidth(size: int) -> float:
    """Return bytes per second, read and written, of a copy on the device that moves ``size`` bytes in all."""
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / cold_milliseconds(lambda: target.copy_(source), 2) * 1e3


def measure(name: str, x: Tensor) -> list[dict[str, Any]]:
    """Return one row for each shape, the fastest first."""
    kind, run, rows = CASES[name][0], case(name, x), []
    moved, used = 2 * x.numel() * x.element_size(), SHAPES[kind]
    for shape in dict.fromkeys([used, *GRID[kind]]):
        row = {"case": name, "size": list(x.shape), "in_use": shape == used, "shape": shape._asdict()}
        SHAPES[kind] = shape
        try:
            row["ms"] = cold_milliseconds(functools.partial(run, exact.quantize_exact), 2)
            row["copy"] = moved / row["ms"] * 1e3 / copy_bandwidth(moved)
        except Exception as error:  # a shape may need more than the device has
            row["failed"] = f"{type(error).__name__}: {str(error)[:80]}"
        rows.append(row)
    SHAPES[kind] = used
    return sorted(rows, key=lambda row: row.get("ms", float("inf")))


def shown(row: dict[str, Any]) -> str:
    figures = row.get("failed") or f"{row['ms']:.4f} ms {row['copy']:4.0%} of copy"
    return f"  {'*' if row['in_use'] else ' '} {figures}  {row['shape']}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Shapes of the launches of bf16 emulation")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--cases", help="some of the cases, separated by semicolons")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    refuse_without_cuda()
    names = arguments.cases.split(";") if arguments.cases else list(CASES)
    result: dict[str, Any] = header(arguments.commit) | {"differing": {}, "rows": []}
    small = sample(*CHECKED)
    for name in names:
        run = case(name, small)
        result["differing"][name] = differing(run(exact.quantize_exact), run(reference.quantize_exact))
    for name in names:
        for size in SIZES:
            rows = measure(name, sample(*size))
            print(f"{name}, {size[0]}×{size[1]}", *map(shown, rows), sep="\n", flush=True)
            result["rows"] += rows
    wrong = [name for name, count in result["differing"].items() if count and not CASES[name][4]]
    print(f"other bits than the reference: {', '.join(wrong) or 'none'}")
    write(arguments.out, result)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
