"""Checks of the Blackwell backend: whether it can run on this machine, and whether its results are correct."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Collection

import torch
from torch import Tensor

from snip_megatron.gemm.backend import GemmBackend
from snip_megatron.gemm.blackwell_engine import NATIVE, transformer_engine
from snip_megatron.gemm.operands import GradientKeys
from snip_megatron.precision import Format

CAPABILITIES = ((10, 0), (10, 3))
"""sm_100 and sm_103. On sm_110 and above, stochastic rounding to E2M1 returns zeros in released versions of
Transformer Engine (its pull request 3281), and MXFP8 lacks layouts on sm_120."""

LEAST_VERSION = (2, 9)

# Signal to noise ratios below which a result is wrong. Correct kernels reach 15 to 17 and 27 to 29 dB. A wrong layout,
# a missing scale or a gradient of zeros stays below these limits.
LEAST_DECIBEL = {Format.NVFP4: 12.0, Format.MXFP8: 25.0}
_EDGE, _DRAWS = 256, 32
_BIASED = 0.5


def is_blackwell() -> bool:
    """Whether the CUDA device is of compute capability 10.0 or above."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def availability(formats: Collection[Format] | None = None, *, sharded: bool = False) -> str | None:
    """Return why the Blackwell backend cannot run on this machine, or None if it can.

    Args:
        formats: the formats that GEMMs will use; None if they are unknown.
        sharded: whether weights are sharded over tensor parallel ranks.
    """
    return _no_device() or _no_transformer_engine() or _no_format(formats, sharded)


def _no_device() -> str | None:
    if not torch.cuda.is_available():
        return "needs a Blackwell GPU (sm_100 or sm_103) and there is no CUDA device here"
    capability = torch.cuda.get_device_capability()
    if capability in CAPABILITIES:
        return None
    found = f"{torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}"
    if capability > CAPABILITIES[0]:
        found += ", where stochastic rounding of gradients to nvfp4 gives zeros or mxfp8 lacks a GEMM"
    return f"needs a Blackwell GPU (sm_100 or sm_103) and {found}"


def _no_transformer_engine() -> str | None:
    least = ".".join(map(str, LEAST_VERSION))
    if importlib.util.find_spec("transformer_engine") is None:
        return f"needs Transformer Engine {least} or later, which is not installed"
    version = importlib.metadata.version("transformer_engine")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < LEAST_VERSION:
        return f"needs Transformer Engine {least} or later and {version} is installed"
    try:
        transformer_engine()
    except Exception as error:  # an incompatible shared object may raise anything
        return f"Transformer Engine {version} cannot be imported ({_line(error)})"
    return None


def _no_format(formats: Collection[Format] | None, sharded: bool) -> str | None:
    others = sorted(fmt.value for fmt in formats or () if fmt not in (*NATIVE, Format.BF16))
    if others:
        own = ", ".join(fmt.value for fmt in NATIVE)
        return f"runs {own} and bf16, not {', '.join(others)} (see --snip-formats, --snip-pin, --snip-map)"
    wants_nvfp4 = formats is None or any(fmt.base is Format.NVFP4 for fmt in formats)
    if sharded and wants_nvfp4 and not transformer_engine().takes_amax:
        return "nvfp4 under tensor parallelism needs Transformer Engine 2.17 or later: one amax for all shards"
    return None


# -- numbers -------------------------------------------------------------------------------------------------------
def wrong_numbers(backend: GemmBackend, device: torch.device | str, formats: Collection[Format] = NATIVE) -> str | None:
    """Return what is wrong with the backend's results on ``device``, or None if they are correct.

    Compares three products of 256×256 matrices per format with FP32, and the mean of 32 stochastic roundings of a
    gradient with the gradient. This takes milliseconds and runs once, before training. It finds kernels that return
    wrong results without an error.
    """
    for fmt in formats:
        try:
            fault = _wrong_products(backend, device, fmt) or _wrong_rounding(backend, device, fmt)
        except Exception as error:  # Transformer Engine raises RuntimeError, AssertionError and others
            fault = f"fails ({_line(error)})"
        if fault is not None:
            return f"{fmt.value} {fault} on this device"
    return None


def _wrong_products(backend: GemmBackend, device: torch.device | str, fmt: Format) -> str | None:
    x, w, g = _operands(device)
    x_row, x_col = backend.quantize_input(x, fmt, fmt)
    w_row, w_col = backend.quantize_weight(w, fmt, fmt)
    g_row, g_col = backend.quantize_gradient(g, fmt, fmt, _keys(0, device))
    out = torch.ones(_EDGE, _EDGE, device=device)
    found = {
        "fprop": (backend.fprop(x_row, w_row, dtype=torch.bfloat16), x.float() @ w.float().t()),
        "dgrad": (backend.dgrad(g_row, w_col, dtype=torch.bfloat16), g.float() @ w.float()),
        "wgrad": (backend.wgrad(g_col, x_col, out=out) - 1.0, g.float().t() @ x.float()),
    }
    for gemm, (product, exact) in found.items():
        signal = _decibel(exact, product)
        if not signal >= LEAST_DECIBEL[fmt]:
            return f"gives a signal to noise ratio of {signal:.1f} dB in {gemm} (at least {LEAST_DECIBEL[fmt]:.0f})"
    return None


def _wrong_rounding(backend: GemmBackend, device: torch.device | str, fmt: Format) -> str | None:
    """Check for nvfp4 that the mean of many stochastic roundings is closer to G than one of them is."""
    if fmt is not Format.NVFP4:
        return None
    _, _, g = _operands(device)
    _, identity = backend.quantize_weight(torch.eye(_EDGE, device=device, dtype=g.dtype), None, fmt)
    draws = []
    for seed in range(_DRAWS):
        side, _ = backend.quantize_gradient(g, fmt, None, _keys(seed, device))
        draws.append(backend.dgrad(side, identity, dtype=torch.float32))
    errors = [float((draw - g).norm()) for draw in (draws[0], torch.stack(draws).mean(0))]
    if errors[1] > _BIASED * errors[0]:
        return f"rounds gradients with a bias (error of one draw {errors[0]:.3g}, of the mean of 32 {errors[1]:.3g})"
    return None


def _operands(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, w, g = (torch.randn(_EDGE, _EDGE, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    return x, w, g


def _keys(seed: int, device: torch.device | str) -> GradientKeys:
    return GradientKeys(2 * seed, 2 * seed + 1, torch.arange(_EDGE, device=device))


def _decibel(exact: Tensor, found: Tensor) -> float:
    noise = (found.float() - exact).norm().square()
    return float(10 * torch.log10(exact.norm().square() / noise))


def _line(error: Exception) -> str:
    """Return the error's type and the first non-empty line of its message, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
