"""The three GEMMs of a linear with quantised operands, in plain torch: the numbers every other backend is judged by.

METHOD, Formats: X and G in 1×128 tiles along the GEMM's reduction dimension, W in 128×128 blocks, stochastic rounding
for G in the 4-bit formats only. Operands are dequantised to FP32 and multiplied in FP32, so the result differs from
exact arithmetic on the quantised operands by FP32 summation only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization import FOUR_BIT, fake_quantize
from snip_megatron.quantization.formats import resolve

Amaxes = tuple[Tensor | None, Tensor | None]
"""max|·| of the whole of the two operands, 0-dim, where these are shards (fp8_tensor, nvfp4); None: their own."""


def fprop(
    x: Tensor,
    w: Tensor,
    fmt: Format | str,
    *,
    amax: Amaxes = (None, None),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Y = Q(X)·Q(W)ᵀ.

    Args:
        x: fp32, bf16 or fp16 [T, K]; T may be 0.
        w: likewise [N, K].
        fmt: a format; bf16 means no quantisation, a plain product in the operands' dtype.
        amax: as in :data:`Amaxes`, of (x, w).
        out_dtype: dtype of the result; default that of ``x``.

    Returns:
        [T, N]. Raises SnipError on an unknown format, dtype or number of dimensions, as do the other two.
    """
    if fmt == Format.BF16:
        return (x @ w.t()).to(out_dtype or x.dtype)
    left, right = fake_quantize(x, fmt, tensor_amax=amax[0]), fake_quantize(w, fmt, block=True, tensor_amax=amax[1])
    return (left @ right.t()).to(out_dtype or x.dtype)


def dgrad(
    g: Tensor,
    w: Tensor,
    fmt: Format | str,
    *,
    seed: int | None = None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    amax: Amaxes = (None, None),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """D = Q(G)·Q(W): [T, N] · [N, K] → [T, K]; G in tiles along N.

    Args:
        seed: key of stochastic rounding, required by the 4-bit formats, unused by the others.
        offset, rows, cols: global position of G's elements (see :func:`snip_megatron.quantization.fake_quantize`).
        amax: as in :data:`Amaxes`, of (g, w).
        out_dtype: dtype of the result; default that of ``g``.
    """
    if fmt == Format.BF16:
        return (g @ w).to(out_dtype or g.dtype)
    draws = _gradient_rounding(fmt, seed, offset, rows, cols)
    # axis=0 (along N, the reduction) is for weights of formats without square blocks.
    left = fake_quantize(g, fmt, tensor_amax=amax[0], **draws)
    return (left @ fake_quantize(w, fmt, axis=0, block=True, tensor_amax=amax[1])).to(out_dtype or g.dtype)


def wgrad(
    g: Tensor,
    x: Tensor,
    fmt: Format | str,
    *,
    seed: int | None = None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    amax: Amaxes = (None, None),
    out: Tensor | None = None,
) -> Tensor:
    """∇W = Q(G)ᵀ·Q(X): [T, N], [T, K] → FP32 [N, K]; both in tiles along T.

    Args:
        seed, offset, rows, cols: as in :func:`dgrad`.
        amax: as in :data:`Amaxes`, of (g, x).
        out: FP32 [N, K] (``main_grad``) to accumulate into; it is then also the result.
    """
    if fmt == Format.BF16:
        # Products of bf16 are exact in FP32, and a bf16 result would lose most of a small gradient in accumulation.
        left, right = g.to(torch.float32), x.to(torch.float32)
    else:
        draws = _gradient_rounding(fmt, seed, offset, rows, cols)
        left = fake_quantize(g, fmt, axis=0, tensor_amax=amax[0], **draws)
        right = fake_quantize(x, fmt, axis=0, tensor_amax=amax[1])
    return left.t() @ right if out is None else out.addmm_(left.t(), right)


def _gradient_rounding(
    fmt: Format | str, seed: int | None, offset: tuple[int, int], rows: Tensor | None, cols: Tensor | None
) -> dict[str, Any]:
    """Keyword arguments of ``fake_quantize`` for G: stochastic in the 4-bit formats, nearest elsewhere."""
    if resolve(fmt) not in FOUR_BIT:
        return {}
    return {"rounding": "stochastic", "seed": seed, "offset": offset, "rows": rows, "cols": cols}
