"""Quantisation kernels on a GPU: bitwise comparison with the torch reference, and bandwidth relative to a copy.

    python -m benchmarks.kernels.quantize --out results/kernels/F.json [--sweep | --orders]

Every row names a kernel and a shape. ``fraction`` is its bytes (read once, written once) over its time, divided by the
same for a device-to-device copy of as many bytes in the same run. Both start with a cold L2 cache, and neither includes
its launch; ``host_us`` is the host time of the launch. ``tensor`` reads its matrix twice unless the amax is known, and
both reads are counted. The exit code is 1 if a kernel differs from the reference.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import cold_milliseconds, header, refuse_without_cuda, write
from snip_megatron.numerics.quantize import operands
from snip_megatron.numerics.quantize.kernels import programs as triton_kernels
from snip_megatron.numerics.quantize.kernels import quantize as triton_quantize
from snip_megatron.numerics.quantize.operands import GradientKeys, Operand, OperandPair, OperandSpec
from snip_megatron.precision import Format

FP8, FP4, WHOLE = Format.FP8, Format.FP4, Format.FP8_TENSOR
ACTIVATIONS = ((8192, 4096), (8192, 8192), (8192, 28672), (16384, 4096), (16384, 14336))
WEIGHTS = ((4096, 4096), (8192, 8192), (28672, 4096))
CORRECTNESS = ((1000, 4096), (4096, 1000), (333, 777), (2048, 2048))
SWEEP = {  # kind of kernel → (num_warps, maxnreg)
    "tiles": ((8, 56), (8, 64), (8, 72), (8, 80)),
    "fp8 rows": ((8, 56), (8, 64), (8, 72), (8, 80)),
    "stochastic": ((8, 56), (8, 64), (8, 72), (8, 80), (8, 96)),
    "blocks": ((8, 56), (8, 64), (8, 80), (16, 40)),
    "tensor": ((8, 56), (8, 64), (16, 32), (16, 40), (16, 48)),
}
Call = Callable[[torch.Tensor], OperandPair]


def cases(module: Any) -> dict[str, Call]:
    """Return kernel name → call, for the Triton module or the reference, whose functions have the same names."""
    keys = GradientKeys(2**63 + 11, 12, paired=True)
    specs: dict[str, Callable[[torch.Tensor], OperandSpec]] = {
        "tiles fp8 row": lambda x: OperandSpec(FP8, None),
        "tiles fp8 row+col": lambda x: OperandSpec(FP8, FP8),
        "tiles fp8 row, fp4 col": lambda x: OperandSpec(FP8, FP4),
        "tiles fp4 row+col": lambda x: OperandSpec(FP4, FP4),
        "tiles fp4 row+col stochastic": lambda x: OperandSpec(FP4, FP4, keys=keys),
        "tiles fp4 row+col stochastic, given columns": lambda x: OperandSpec(
            FP4, FP4, keys=keys._replace(cols=columns(x.shape[1]), paired=x.shape[1] % 4 == 0)
        ),
        "tiles fp4 col stochastic": lambda x: OperandSpec(None, FP4, keys=keys),
        "tensor fp8 row+col": lambda x: OperandSpec(WHOLE, WHOLE),
        "tensor fp8 row+col, known amax": lambda x: OperandSpec(WHOLE, WHOLE, amax=largest()),
        "blocks fp8 row+col": lambda x: OperandSpec(FP8, FP8, weight=True),
        "blocks fp8 row, fp4 col": lambda x: OperandSpec(FP8, FP4, weight=True),
    }
    return {name: lambda x, spec=spec: module.quantize_operands(x, spec(x)) for name, spec in specs.items()}  # type: ignore[misc]


def kind(name: str) -> str:
    """Return the entry of ``triton_quantize.LAUNCH`` that a case uses."""
    for word, group in (("stochastic", "stochastic"), ("blocks", "blocks"), ("tensor", "tensor")):
        if word in name:
            return group
    return "fp8 rows" if name.startswith("tiles fp8 row") and "col" in name else "tiles"


@functools.cache
def columns(count: int) -> torch.Tensor:
    """Return the ids of one of two shards of a gated linear, which are not contiguous, as in training."""
    halves = torch.arange(2 * count, device="cuda")[: count // 4 * 8].view(2, 2, -1)[:, 1].reshape(-1)
    return torch.cat([halves, torch.arange(2 * count, 2 * count + count - halves.numel(), device="cuda")])


@functools.cache
def largest() -> torch.Tensor:
    return torch.tensor(3.0, device="cuda")


def sample(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normal numbers with rows of different size, a zero tile, tiny numbers and signed zeros."""
    x = torch.randn(rows, cols, device="cuda") * torch.randn(rows, 1, device="cuda").mul_(3).exp_()
    x[0] = 0.0
    x[rows // 2] *= 1e-36
    x[-1, :7] = -0.0
    return x.to(dtype)


def all_quotients() -> torch.Tensor:
    """Return bf16 [128, …]: every amax mantissa in tiles of all mantissas from its own size down to 2^-21 of it."""
    mantissas = 128.0 + torch.arange(128)
    smaller = torch.cat([mantissas * 2.0**-shift for shift in range(21)])
    smaller = torch.cat([smaller, smaller[: -len(smaller) % 127]]).view(1, -1, 127).expand(128, -1, -1)
    amax = (2 * mantissas).view(128, 1, 1).expand(-1, smaller.shape[1], -1)
    return torch.cat([amax, smaller], dim=2).flatten(1).to("cuda", torch.bfloat16)


def parts(pair: OperandPair) -> Iterable[tuple[str, Operand]]:
    return ((name, side) for name, side in zip(("row", "col"), pair, strict=True) if side is not None)


def difference(actual: OperandPair, expected: OperandPair) -> str | None:
    """Return what differs, or None. Scales must be equal. Of the values 1e-4 may differ: another rounding of a quotient
    changes what its draw decides.
    """
    for (name, side), (_, reference) in zip(parts(actual), parts(expected), strict=True):
        if not torch.equal(side.scale, reference.scale):
            return f"{name} scales: {int((side.scale != reference.scale).sum())} of {side.scale.numel()}"
        wrong = side.values.view(torch.uint8) != reference.values.view(torch.uint8)
        if int(wrong.sum()) > wrong.numel() * 1e-4:
            return f"{name} values: {int(wrong.sum())} of {wrong.numel()}"
    return None


def bias(x: torch.Tensor, draws: int = 64) -> float:
    """Return the mean error of stochastic fp4 over ``draws`` seeds, in standard errors."""
    total, square = 0.0, 0.0
    for seed in range(draws):
        spec = OperandSpec(FP4, None, keys=GradientKeys(seed, None, paired=True))
        row, _ = triton_quantize.quantize_operands(x, spec)
        error = (row.dequantize().double() - x.double()) / row.scale.repeat_interleave(128, 1)[:, : x.shape[1]]
        total, square = total + error.sum().item(), square + error.square().sum().item()
    return float(total / square**0.5)


def moved_bytes(name: str, x: torch.Tensor, pair: OperandPair) -> int:
    reads = [x, x] if name == "tensor fp8 row+col" else [x]
    tensors = reads + [t for _, side in parts(pair) for t in (side.values, side.scale)]
    return sum(t.numel() * t.element_size() for t in tensors)


def compiled() -> dict[int, Any]:
    """Return every kernel that was compiled so far."""
    kernels = (getattr(triton_kernels, f"{name}_kernel") for name in ("tile", "block", "amax", "tensor"))
    return {id(k): k for kernel in kernels for caches in kernel.device_caches.values() for k in caches[0].values()}


RESOURCES: dict[tuple[str, str], dict[str, int]] = {}


def resources(name: str, call: Callable[[], object]) -> dict[str, int]:
    """Return the registers per thread, and the spilled ones, of the kernel that a case launches first."""
    key = (name, str(triton_quantize.LAUNCH[kind(name)]))
    if key not in RESOURCES:
        before = compiled()
        call()
        new = [kernel for place, kernel in compiled().items() if place not in before]
        RESOURCES[key] = {"registers": new[-1].n_regs, "spills": new[-1].n_spills} if new else {}
    return RESOURCES[key]


@functools.cache
def copy_bandwidth(size: int) -> float:
    """Return the bytes per second, read and written, of a device-to-device copy that moves ``size`` bytes in all."""
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / cold_milliseconds(lambda: target.copy_(source)) * 1e3


def host_microseconds(call: Callable[[], object], count: int = 50) -> float:
    """Return how long a call occupies the launching thread."""
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def check() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ours, reference = cases(triton_quantize), cases(operands)
    inputs = [(f"{m}x{k} bf16", sample(m, k)) for m, k in CORRECTNESS]
    inputs += [("333x777 fp32", sample(333, 777, torch.float32)), ("333x777 fp16", sample(333, 777).half())]
    inputs += [("all bf16 quotients", all_quotients()), ("all bf16 quotients, along rows", all_quotients().t())]
    for shape, x in inputs:
        for name, call in ours.items():
            rows.append({"kernel": name, "input": shape, "difference": difference(call(x), reference[name](x))})
    sigmas = bias(torch.randn(1024, 4096, device="cuda").bfloat16())
    far = None if abs(sigmas) < 4 else f"{sigmas:.1f} standard errors"
    return [*rows, {"kernel": "stochastic bias", "input": "64 seeds", "sigmas": sigmas, "difference": far}]


def measure(shapes: Iterable[tuple[int, int]], names: Iterable[str]) -> list[dict[str, Any]]:
    rows, ours = [], cases(triton_quantize)
    for m, k in shapes:
        x = sample(m, k)
        for name in names:
            call = functools.partial(ours[name], x)
            used = resources(name, call)
            size = moved_bytes(name, x, call())
            duration, copy = cold_milliseconds(call), copy_bandwidth(size)
            speed = size / duration * 1e3
            row = {"kernel": name, "shape": [m, k], "bytes": size, "ms": duration, "copy_tb_s": copy / 1e12}
            row |= {"tb_s": speed / 1e12, "fraction": speed / copy, "host_us": host_microseconds(call)}
            rows.append(row | used | {"launch": dict(triton_quantize.LAUNCH[kind(name)])})
            print(
                f"{name:43s} {m:6d}×{k:<6d} {duration:8.4f} ms {speed / 1e12:6.2f} TB/s {speed / copy:6.1%} of copy "
                f"{used.get('registers', -1):4d} registers {used.get('spills', -1):4d} spills"
            )
    return rows


def sweep() -> list[dict[str, Any]]:
    """Measure the same kernels with other launch options."""
    rows: list[dict[str, Any]] = []
    for group, candidates in SWEEP.items():
        names = [name for name in cases(triton_quantize) if kind(name) == group and "given" not in name]
        default = triton_quantize.LAUNCH[group]
        for warps, registers in candidates:
            triton_quantize.LAUNCH[group] = {"num_warps": warps, "maxnreg": registers}
            print(f"-- {group}: {warps} warps, at most {registers} registers")
            rows += measure([(8192, 8192)], names)
        triton_quantize.LAUNCH[group] = default
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Quantisation kernels: correctness and bandwidth")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--sweep", action="store_true", help="also try other launch options")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    refuse_without_cuda()
    torch.manual_seed(0)
    checks = check()
    wrong = [row for row in checks if row["difference"] is not None]
    for row in wrong:
        print(f"DIFFERS {row['kernel']} on {row['input']}: {row['difference']}")
    print(f"{len(checks) - len(wrong)} of {len(checks)} checks agree with the reference")
    names = list(cases(triton_quantize))
    result = header(arguments.commit) | {
        "launch": {name: dict(options) for name, options in triton_quantize.LAUNCH.items()},
        "checks": checks,
        "rows": measure(ACTIVATIONS, [n for n in names if not n.startswith("blocks")])
        + measure(WEIGHTS, [n for n in names if n.startswith("blocks")]),
        "sweep": sweep() if arguments.sweep else [],
    }
    result["lowest"] = {name: min(row["fraction"] for row in result["rows"] if row["kernel"] == name) for name in names}
    for name, fraction in result["lowest"].items():
        print(f"lowest {fraction:6.1%} of copy: {name}")
    write(arguments.out, result)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
