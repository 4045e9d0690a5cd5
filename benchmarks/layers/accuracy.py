"""Accuracy of a linear against float64 on sampled rows: signal-to-noise ratios, and errors of its GEMMs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.layers.contenders import Contender, Problem
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.quantize.operands import GradientKeys, Operand, OperandSpec
from snip_megatron.precision import Format, Gemm

ROWS = 48
_BEFORE = 2.0**-5  # in the gradient before wgrad is added; of the product's own size
# For independent normal operands. Signal to noise (dB) of Y, ∂L/∂X, ∇W; relative error of a GEMM's arithmetic alone.
BOUNDS: dict[str, dict[str, float]] = {
    "sqnr_db": {"fp8": 27.5, "fp8_tensor": 27.0, "fp4": 13.0, "bf16": 40.0},
    "sqnr_db_te": {"fp8": 27.5, "fp8_tensor": 24.0},  # current scaling rounds gradients to E5M2
    "gemm_error": {"fp8": 3e-4, "fp8_tensor": 3e-4, "fp4": 5e-7},
    "gemm_error_fast": {"fp8_tensor": 7e-3},  # grows with the depth: 6.5e-3 over 57,344
}


def relative_error(exact: Tensor, actual: Tensor) -> float:
    """Return ‖actual − exact‖ / ‖exact‖."""
    return float((actual.double() - exact).norm() / exact.norm())


def decibel(exact: Tensor, actual: Tensor) -> float:
    error = relative_error(exact, actual)
    return math.inf if error == 0 else -20 * math.log10(error)


def sample(size: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(size)
    return torch.randperm(size, device="cuda", generator=generator)[:ROWS]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b in float64.

    The large operand is multiplied in slices, because a float64 copy of a whole weight may not fit.
    """
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for start in range(0, b.shape[0], 4096):
        total += a[:, start : start + 4096].double() @ b[start : start + 4096].double()
    return total


def sqnr(problem: Problem, contender: Contender) -> dict[str, float]:
    """Return the signal-to-noise ratio in dB of one microbatch's Y, ∂L/∂X and ∇W (from main_grad) over sampled rows."""
    x, w, g = problem.x.detach(), problem.weight.detach(), problem.g
    main_grad: Tensor = problem.weight.main_grad  # type: ignore[attr-defined]
    main_grad.zero_()
    y = contender.once()
    assert problem.x.grad is not None
    tokens, features = sample(x.shape[0]), sample(w.shape[0])
    return {
        "y": decibel(product(x[tokens], w.t()), y[tokens]),
        "dx": decibel(product(g[tokens], w), problem.x.grad[tokens]),
        "dw": decibel(product(g[:, features].t(), x), main_grad[features]),
    }


def gemm_errors(problem: Problem, backend: GemmBackend, fmt: Format) -> dict[str, float]:
    """Return the errors of the GEMMs alone: FP32 results against the float64 product of the quantised operands."""
    x, w, g = problem.x.detach(), problem.weight.detach(), problem.g
    keys = GradientKeys(1, 2, torch.arange(w.shape[0], device="cuda"), paired=True)
    x_row, x_col = backend.quantize(x, OperandSpec(fmt, fmt))
    w_row, w_col = backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
    g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=keys))
    added = torch.full_like(problem.weight.main_grad, _BEFORE)  # type: ignore[attr-defined]
    backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32, added)
    tokens, features = sample(x.shape[0]), sample(w.shape[0])
    return {
        "fprop": _error(x_row, w_row, tokens, backend.multiply(Gemm.FPROP, x_row, w_row, torch.float32)),
        "dgrad": _error(g_row, w_col, tokens, backend.multiply(Gemm.DGRAD, g_row, w_col, torch.float32)),
        "wgrad": _error(g_col, x_col, features, backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32)),
        "wgrad_accumulated": _error(g_col, x_col, features, added - _BEFORE),
    }


def _error(a: Operand, b: Operand, rows: Tensor, actual: Tensor) -> float:
    return relative_error(product(a.dequantize()[rows], b.dequantize().t()), actual[rows])


def violations(row: dict[str, Any]) -> list[str]:
    """Return one line for each figure that is out of bounds. NaN is out of bounds."""
    faults = []
    for contender, values in row["sqnr_db"].items():
        who, _, fmt = contender.partition(" ")
        bound = BOUNDS["sqnr_db_te" if who == "te" else "sqnr_db"]["bf16" if who == "bf16" else fmt]
        faults += [f"{contender} {name}: {v:.2f} dB, at least {bound}" for name, v in values.items() if not v >= bound]
    for fmt, values in row["gemm_error"].items():
        for name, value in values.items():
            kind = "gemm_error_fast" if fmt == "fp8_tensor" and name in ("fprop", "dgrad") else "gemm_error"
            bound = BOUNDS[kind][fmt]
            if not value <= bound:
                faults.append(f"{fmt} {name}: error {value:.2e}, at most {bound:.0e}")
    return faults
