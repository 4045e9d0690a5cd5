"""A check of a backend on the device at hand, before its numbers are used.

It finds compilers that refuse a kernel, and libraries and devices whose numbers are wrong without an error: a wrong
layout, a missing scale, a gradient of zeros, rounding with a bias.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.quantize.formats import STOCHASTIC
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import FOUR_BIT, Format, Gemm
from snip_megatron.precision.errors import SnipError, first_line

LEAST_DECIBEL = {4: 12.0, 8: 25.0}
"""Bits of a format → signal to noise ratio below which a product is wrong. Correct ones reach 15 to 19 and 27 to 31."""
_EDGE, _DRAWS = 256, 32
_BIASED = 0.5  # of the error of one draw; without a bias, the mean of 32 has .18 of it
_REPEATS = 3  # a replay begins at the third call


def wrong_numbers(backend: GemmBackend, device: torch.device | str, formats: Collection[Format]) -> str | None:
    """Return what is wrong with the backend's results on ``device``, or None if they are correct.

    Three products of 256×256 matrices in each format are compared with FP32, and the mean of 32 stochastic roundings of
    a gradient with the gradient. This takes milliseconds. Raises SnipError if the device fails.
    """
    for fmt in formats:
        if fmt is Format.BF16:
            continue
        try:
            fault = _wrong_products(backend, device, fmt) or _wrong_rounding(backend, device, fmt)
        except torch.AcceleratorError as error:  # of the device's context: nothing runs on the device any more
            raise SnipError(
                f"{fmt.value} on the {backend.name} GEMMs: the device fails ({first_line(error)}); start again"
                " with --snip-gemm reference"
            ) from error
        except Exception as error:  # compilers, drivers and libraries raise what they like
            fault = f"fails ({first_line(error)})"
        if fault is not None:
            return f"{fmt.value} {fault} on this device"
    return None


def _wrong_products(backend: GemmBackend, device: torch.device | str, fmt: Format) -> str | None:
    x, w, g = _operands(device)
    for repeat in range(_REPEATS):
        out = torch.ones(_EDGE, _EDGE, device=device)
        w_row, w_col = backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
        y, saved_x = backend.forward(x, w_row, OperandSpec(fmt, fmt))
        assert saved_x is not None
        d, _ = backend.backward(g, w_col, saved_x, OperandSpec(fmt, fmt, keys=_keys(repeat, device)), out)
        for gemm, product, exact in (
            (Gemm.FPROP, y, x.float() @ w.float().t()),
            (Gemm.DGRAD, d, g.float() @ w.float()),
            (Gemm.WGRAD, out - 1.0, g.float().t() @ x.float()),
        ):
            signal, least = decibel(exact, product), LEAST_DECIBEL[4 if fmt.base in FOUR_BIT else 8]
            if not signal >= least:
                return f"gives a signal to noise ratio of {signal:.1f} dB in {gemm.value} (at least {least:.0f})"
    return None


def _wrong_rounding(backend: GemmBackend, device: torch.device | str, fmt: Format) -> str | None:
    """Check that the mean of many stochastic roundings is closer to G than one of them is."""
    if fmt not in STOCHASTIC:
        return None
    _, _, g = _operands(device)
    identity = torch.eye(_EDGE, device=device, dtype=g.dtype)
    _, w = backend.quantize(identity, OperandSpec(None, fmt, weight=True))
    draws = []
    for seed in range(_DRAWS):
        rowwise, _ = backend.quantize(g, OperandSpec(fmt, None, keys=_keys(seed, device)))
        draws.append(backend.multiply(Gemm.DGRAD, rowwise, w, torch.float32))
    errors = [float((draw - g).norm()) for draw in (draws[0], torch.stack(draws).mean(0))]
    if errors[1] > _BIASED * errors[0]:
        return f"rounds gradients with a bias (error of one draw {errors[0]:.3g}, of the mean of 32 {errors[1]:.3g})"
    return None


def decibel(exact: Tensor, approximate: Tensor) -> float:
    """Return the signal to noise ratio of ``approximate`` in dB, infinity without noise."""
    exact = exact.detach().double()
    noise = (approximate.detach().double() - exact).norm()
    return float(20 * torch.log10(exact.norm() / noise)) if noise else math.inf


def _operands(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, w, g = (torch.randn(_EDGE, _EDGE, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    return x, w, g


def _keys(seed: int, device: torch.device | str) -> GradientKeys:
    return GradientKeys(2**40 + 2 * seed, 2**41 + 2 * seed, torch.arange(_EDGE, device=device), paired=True)
