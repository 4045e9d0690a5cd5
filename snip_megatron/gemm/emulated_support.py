"""A check of the emulated backend on the device itself, before training."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.gemm.operands import GradientKeys
from snip_megatron.precision import Format
from snip_megatron.quantization.formats import STOCHASTIC

_SHAPE = (256, 384, 512)  # T, N, K
_LARGEST_ERROR = 1e-5  # of FP32 results, relative to the reference's; another order of additions gives 1e-6
_LARGEST_OF_DRAWS = 1e-2  # one draw that is decided otherwise gives 2e-3


def unlike_reference(backend: GemmBackend, device: torch.device | str, formats: Collection[Format]) -> str | None:
    """Return how results of ``backend`` on ``device`` differ from the reference's there, or None if they do not.

    Runs three small products in each of ``formats``. This finds compilers and libraries that refuse a kernel or return
    wrong numbers.

    Raises:
        SnipError: the device failed, so that nothing else can run on it.
    """
    for fmt in formats:
        if fmt is Format.BF16:
            continue
        try:
            both = (_products(b, device, fmt) for b in (backend, REFERENCE))
            for gemm, found, expected in zip(("fprop", "dgrad", "wgrad"), *both, strict=True):
                error = float((found - expected).norm() / expected.norm())
                drawn = fmt in STOCHASTIC and gemm != "fprop"
                if not error < (_LARGEST_OF_DRAWS if drawn else _LARGEST_ERROR):
                    return f"{fmt.value} {gemm} differs from the reference by {error:.1e} on this device"
        except torch.AcceleratorError as error:  # of the device's context: nothing runs on the device any more
            first = str(error).partition("\n")[0][:160]
            raise SnipError(
                f"{fmt.value} on the {backend.name} GEMMs: the device fails ({first}); start again with"
                " --snip-gemm reference"
            ) from error
        except Exception as error:  # compilers and drivers raise what they like
            first = (str(error).splitlines() or [""])[0]
            return f"{fmt.value} fails on this device ({type(error).__name__}: {first[:160]})"
    return None


def _products(backend: GemmBackend, device: torch.device | str, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Return Y, the input gradient and the weight gradient of one linear, FP32."""
    generator = torch.Generator().manual_seed(3)
    tokens, n, k = _SHAPE
    x, w, g = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((tokens, k), (n, k), (tokens, n))
    )
    x_row, x_col = backend.quantize_input(x, fmt, fmt)
    w_row, w_col = backend.quantize_weight(w, fmt, fmt)
    g_row, g_col = backend.quantize_gradient(g, fmt, fmt, GradientKeys(1, 2, torch.arange(n, device=device)))
    out = torch.zeros(n, k, device=device)
    return (
        backend.fprop(x_row, w_row, dtype=torch.float32),
        backend.dgrad(g_row, w_col, dtype=torch.float32),
        backend.wgrad(g_col, x_col, out=out),
    )
