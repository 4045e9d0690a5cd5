"""The parts of a linear's time: each quantisation and each GEMM alone, with its speed relative to its limit."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from benchmarks.common import interleaved
from benchmarks.layers.contenders import MICROBATCHES, Problem
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.cublaslt import CublasLtError, cublaslt
from snip_megatron.numerics.quantize.operands import GradientKeys, Operand, OperandSpec
from snip_megatron.precision import Format, Gemm

ROUNDS = 5
PROPOSALS = 4
COPIED = 2 << 30  # bytes


def copy_bandwidth(size: int = COPIED) -> float:
    """Return the bytes per second, read and written, of a device-to-device copy that moves ``size`` bytes in all."""
    call = _copy(size)
    return size / interleaved({"copy": call}, 20, head_start=True)["copy"] * 1e3


def measure_parts(problem: Problem, backend: GemmBackend, fmt: Format) -> dict[str, dict[str, float]]:
    """Return name → milliseconds per microbatch and rate of each part.

    Quantisations have TB/s (bytes read once, written once) and their share of the bandwidth of a copy of as many bytes.
    GEMMs have TFLOP/s. There are further rows beside the parts that the backend runs: ``product`` is wgrad without
    accumulation, and ``<gemm> #i`` is cuBLASLt's i-th proposal for the same GEMM (wgrad accumulated).
    """
    x, w, g = problem.x.detach(), problem.weight.detach(), problem.g
    main_grad = problem.weight.main_grad  # type: ignore[attr-defined]
    keys = GradientKeys(1, 2, torch.arange(w.shape[0], device="cuda"), paired=True)
    x_row, x_col = backend.quantize(x, OperandSpec(fmt, fmt))
    w_row, w_col = backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
    g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=keys))
    moved = {"x": _bytes(x, x_row, x_col), "g": _bytes(g, g_row, g_col), "w": _bytes(w, w_row, w_col)}
    calls: dict[str, Callable[[], object]] = {
        "quantize x": lambda: backend.quantize(x, OperandSpec(fmt, fmt)),
        "quantize g": lambda: backend.quantize(g, OperandSpec(fmt, fmt, keys=keys)),
        "quantize w": lambda: backend.quantize(w, OperandSpec(fmt, fmt, weight=True)),
        "fprop": lambda: backend.multiply(Gemm.FPROP, x_row, w_row, torch.bfloat16),
        "dgrad": lambda: backend.multiply(Gemm.DGRAD, g_row, w_col, torch.bfloat16),
        "wgrad": lambda: backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32, main_grad),
        "product": lambda: backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32),
    }
    calls |= {f"copy {name}": _copy(size) for name, size in moved.items()}
    calls |= _proposals("fprop", x_row, w_row, None, fast=fmt is Format.FP8_TENSOR)
    calls |= _proposals("wgrad", g_col, x_col, main_grad, fast=False)
    times = interleaved(calls, ROUNDS, head_start=True)
    flops = 2.0 * x.shape[0] * w.numel()
    rows: dict[str, dict[str, float]] = {}
    for name, ms in times.items():
        kind, _, tensor = name.partition(" ")
        if kind == "quantize":
            a_microbatch = ms / MICROBATCHES if tensor == "w" else ms
            rows[name] = {"ms": a_microbatch, "tb_s": moved[tensor] / ms / 1e9, "of_copy": times[f"copy {tensor}"] / ms}
        elif kind != "copy":
            rows[name] = {"ms": ms, "tflop_s": flops / ms / 1e9}
    return rows


def _proposals(
    name: str, a: Operand, b: Operand, out: torch.Tensor | None, *, fast: bool
) -> dict[str, Callable[[], object]]:
    """Return cuBLASLt's proposals for a·bᵀ that run, by number: in bf16, or added to ``out``."""
    library = cublaslt()
    calls: dict[str, Callable[[], object]] = {}
    for choice in range(PROPOSALS if library is not None else 0):
        assert library is not None
        run: Callable[[], object] = functools.partial(library.multiply, a, b, torch.bfloat16, fast=fast, choice=choice)
        if out is not None:
            run = functools.partial(library.multiply, a, b, out.dtype, choice=choice, out=out, add=True)
        try:
            if run() is None:
                break
        except CublasLtError as error:
            print(f"{name} #{choice}: {error}")
            continue
        calls[f"{name} #{choice}"] = run
    return calls


def _copy(size: int) -> Callable[[], object]:
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _bytes(tensor: torch.Tensor, *sides: Operand) -> int:
    tensors = [tensor] + [t for side in sides for t in (side.values, side.scale)]
    return sum(t.numel() * t.element_size() for t in tensors)
