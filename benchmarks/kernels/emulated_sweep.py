"""Shapes of the launches of bf16 emulation on this GPU: time of each, bits against the shape in use.

    python -m benchmarks.kernels.emulated_sweep --out emulated_sweep.json

Every case quantises a matrix in both orientations with every shape of a list. The amax of the tensor is given, so that
one kernel runs; ``amax`` is the search for it and that kernel. ``copy`` is the share of the bandwidth of a copy of as
many bytes. A star marks the shape in use. To use another one, edit the table of
``snip_megatron/quantization/kernels/exact_shapes.py``. The exit code is 1 if a shape gives other bits, or the shapes in
use give other bits than the reference.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.common import cold_milliseconds, header, refuse_without_cuda, write
from snip_megatron.quantization import exact as reference
from snip_megatron.quantization.exact import ExactPair
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.kernels import exact
from snip_megatron.quantization.kernels.compiler import compile_variants
from snip_megatron.quantization.kernels.exact_shapes import SHAPES, Shape
from snip_megatron.quantization.kernels.listing import listed

SIZES = ((8192, 4096), (8192, 14336))
CHECKED = (1000, 4224)
# name → kind of launch, format, whether it is a gradient (with stochastic rounding where the format has it)
CASES = {
    "nvfp4 gradient": ("tiles of 16, stochastic", "nvfp4", True),
    "nvfp4": ("tiles of 16", "nvfp4", False),
    "nvfp4_46": ("tiles of 16, four over six", "nvfp4_46", False),
    "nvfp4_hadamard": ("tiles of 16, transformed", "nvfp4_hadamard", False),
    "nvfp4_hadamard gradient": ("tiles of 16, transformed", "nvfp4_hadamard", True),
    "mxfp4 gradient": ("tiles of 32, stochastic", "mxfp4", True),
    "mxfp4_hadamard gradient": ("tiles of 32, transformed", "mxfp4_hadamard", True),
    "mxfp8": ("tiles of 32", "mxfp8", False),
    "amax": ("amax", "nvfp4", False),
}
SMALL_TILES = [
    Shape((128, 8), (256, 2), 4, 4),
    Shape((128, 16), (256, 2), 4, 4),
    Shape((256, 16), (256, 2), 4, 4),
    Shape((128, 8), (256, 2), 4, 4, 64),
    Shape((128, 16), (256, 2), 4, 4, 64),
    Shape((128, 8), (256, 2), 4, 8, 64),
    Shape((32, 16), (64, 2), 1, 4),
    Shape((32, 16), (64, 2), 1, 4, 64),
]
GRID = {
    "tiles of 16, four over six": [
        Shape((32, 16), (64, 2), 1, 4),
        Shape((32, 16), (64, 2), 1, 2),
        Shape((32, 16), (64, 2), 1, 8),
        Shape((64, 16), (64, 2), 1, 4, 96),
        Shape((32, 16), (64, 2), 1, 4, 80),
        Shape((32, 8), (64, 2), 1, 4),
        Shape((64, 16), (128, 2), 2, 4),
        Shape((128, 16), (256, 2), 4, 4),
        Shape((128, 8), (256, 2), 4, 4),
        Shape((128, 16), (256, 2), 4, 4, 80),
    ],
    "amax": [Shape((512, 4), (512, width), warps) for width, warps in ((4, 4), (8, 4), (8, 2), (4, 8), (2, 8))],
}


def case(name: str, x: Tensor, *, known: bool = True) -> Callable[[Callable[..., ExactPair]], ExactPair]:
    """Return a call of a quantiser on ``x``. ``known``: the amax is given."""
    kind, fmt, gradient = CASES[name]
    amax = x.abs().amax().float() if known and kind != "amax" else None
    options: dict[str, Any] = {"amax": amax, "rotation": Rotation(12345, amax)}
    if gradient:
        options |= {"row_seed": 2**63 + 11, "col_seed": 12, "cols": torch.arange(x.shape[1], device=x.device)}
    return lambda quantize: quantize(x, fmt, fmt, **options)


@contextmanager
def using(kind: str, shape: Shape) -> Iterator[None]:
    """Launch a kind with another shape inside this context."""
    exact.SHAPES = {**SHAPES, kind: shape}
    try:
        yield
    finally:
        exact.SHAPES = SHAPES


def shapes(kind: str) -> list[Shape]:
    """Return the shape in use and the others of the list."""
    return list(dict.fromkeys([SHAPES[kind], *GRID.get(kind, SMALL_TILES)]))


def sample(rows: int, cols: int) -> Tensor:
    """Return bf16 numbers whose rows differ in size."""
    generator = torch.Generator("cuda").manual_seed(rows + cols)
    x = torch.randn(rows, cols, device="cuda", generator=generator)
    return (x * torch.rand(rows, 1, device="cuda", generator=generator).exp()).bfloat16()


def compile_all(names: list[str]) -> None:
    """Compile all shapes in processes. The width of a matrix is a constant of a kernel."""
    with listed(run=False) as listing:
        for name, size in itertools.product(names, (*SIZES, CHECKED)):
            kind, x = CASES[name][0], torch.empty(size, dtype=torch.bfloat16, device="cuda")
            for shape in shapes(kind) if size in SIZES else [SHAPES[kind]]:
                with using(kind, shape):
                    case(name, x, known=size in SIZES)(exact.quantize_exact)
    compile_variants(list(listing.variants), triton.runtime.driver.active.get_current_target(), os.cpu_count() or 1)


def equal(found: ExactPair, expected: ExactPair) -> bool:
    """Return whether all bits agree."""
    return all(
        one is not None
        and other is not None
        and torch.equal(one.values.view(torch.int16), other.values.view(torch.int16))
        and (one.scale is None or other.scale is None or torch.equal(one.scale, other.scale))
        for one, other in zip(found, expected, strict=True)
    )


@functools.cache
def copy_bandwidth(size: int) -> float:
    """Return bytes per second, read and written, of a copy on the device that moves ``size`` bytes in all."""
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / cold_milliseconds(lambda: target.copy_(source), 2) * 1e3


def measure(name: str, x: Tensor) -> list[dict[str, Any]]:
    """Return one row for each shape, the fastest first."""
    kind, run = CASES[name][0], case(name, x)
    moved = 3 * x.numel() * x.element_size()
    expected, rows = run(exact.quantize_exact), []
    for shape in shapes(kind):
        row = {"case": name, "kind": kind, "size": list(x.shape), "in_use": shape == SHAPES[kind]}
        row |= {"row": shape.row, "col": shape.col, "warps": shape.warps}
        row |= {"steps": shape.steps, "registers": shape.registers}
        with using(kind, shape):
            try:
                row["bits"] = equal(run(exact.quantize_exact), expected)
                row["ms"] = cold_milliseconds(functools.partial(run, exact.quantize_exact), 2)
            except Exception as error:  # a shape may need more than the device has
                row["failed"] = f"{type(error).__name__}: {str(error)[:80]}"
            else:
                row["gb_s"] = moved / row["ms"] / 1e6
                row["copy"] = row["gb_s"] / copy_bandwidth(moved) * 1e9
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("ms", float("inf")))


def shown(row: dict[str, Any]) -> str:
    star = "*" if row["in_use"] else " "
    names = ("row", "col", "warps", "steps", "registers")
    shape = " ".join(f"{name} {row[name]}" for name in names if row[name] is not None)
    if "failed" in row:
        return f"  {star} {row['failed']}  {shape}"
    bits = "" if row["bits"] else "  OTHER BITS"
    return f"  {star} {row['ms']:.4f} ms {row['gb_s']:5.0f} GB/s {row['copy']:4.0%} of copy  {shape}{bits}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Shapes of the launches of bf16 emulation")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--cases", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    refuse_without_cuda()
    start, names = time.perf_counter(), arguments.cases.split(",")
    compile_all(names)
    print(f"compiled in {time.perf_counter() - start:.0f} s")
    result = header(arguments.commit) | {"reference": {}, "rows": []}
    small = sample(*CHECKED)
    for name in names:
        run = case(name, small, known=False)
        result["reference"][name] = equal(run(exact.quantize_exact), run(reference.quantize_exact))
    for name, size in itertools.product(names, SIZES):
        rows = measure(name, sample(*size))
        print(f"{name}, {size[0]}×{size[1]}: {rows[0]['kind']}", *map(shown, rows), sep="\n", flush=True)
        result["rows"] += rows
    differing = [name for name, same in result["reference"].items() if not same]
    print(f"{time.perf_counter() - start:.0f} s; other bits than the reference: {', '.join(differing) or 'none'}")
    write(arguments.out, result)
    return 1 if differing or any(not row.get("bits", True) for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
