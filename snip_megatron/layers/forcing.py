"""What a measuring pass does in a linear beside forcing a format: a nudge, and the first-order effect of an error."""

from __future__ import annotations

import torch

from snip_megatron.gemm.backend import GemmBackend
from snip_megatron.layers.context import Forced, LinearHandle
from snip_megatron.precision import Gemm

NUDGE = 2.0**-6
"""Size of a nudge in units of the training dtype's precision: 1e-4 of a value in bf16, far below a rounding step, yet
one element in fifty falls on the other side of a rounding boundary. In FP32 a nudge changes nothing."""


def nudged(forced: Forced, gemm: Gemm, left: torch.Tensor, right: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """left·right a trifle too large, rounded to the training dtype, where ``gemm`` is to be nudged; else ``plain``.

    What follows is the noise that any other order of summation would make as well (METHOD, ``measured``: the floor).
    """
    if forced.nudge is not gemm:
        return plain
    if left.is_cuda and left.dtype is not torch.float32 and left.numel():
        product = torch.mm(left, right, out_dtype=torch.float32)
    else:
        product = left.float() @ right.float()
    return (product * (1.0 + NUDGE * torch.finfo(plain.dtype).eps)).to(plain.dtype)


def output_error(
    forced: Forced,
    handle: LinearHandle,
    backend: GemmBackend,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor | None:
    """E of fprop in ``forced.compare``, as training would round it, [T, N] in y's dtype; None where nothing is asked.

    Args:
        x, weight: operands [T, K], [N, K].
        y: the output without the error [T, N].
    """
    fmt = forced.compare
    if fmt is None:
        return None
    x_side, _ = backend.quantize_input(x, fmt, None, amax=handle.shared_amax("x", x, (fmt,)))
    w_side, _ = backend.quantize_weight(weight, fmt, None, amax=handle.shared_amax("w", weight, (fmt,)))
    return (backend.fprop(x_side, w_side, dtype=y.dtype).float() - y.float()).to(y.dtype)


def report_error(forced: Forced, g: torch.Tensor, error: torch.Tensor | None) -> None:
    """⟨G, E⟩ of what this rank holds of both; G as autograd gives it."""
    if error is not None and forced.report is not None:
        forced.report((g.float() * error.float()).sum(dtype=torch.float64))
