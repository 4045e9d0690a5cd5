"""The three GEMMs of a linear with quantised operands, in plain torch. All other backends are compared with these.

X and G are quantised in tiles along the GEMM's reduction dimension (1×128 in fp8 and fp4), W in blocks (128×128). Only
G is rounded stochastically, in the formats of ``STOCHASTIC`` (how-it-works.md, Formats). Operands are dequantised to
FP32 and multiplied in FP32, so that the only error beside quantisation is that of FP32 summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization import fake_quantize
from snip_megatron.quantization.formats import STOCHASTIC, resolve
from snip_megatron.quantization.hadamard import Rotation, turned
from snip_megatron.quantization.rounding import Key

Amaxes = tuple[Tensor | None, Tensor | None]
"""The amaxes of the two unsharded operands, 0-dim, for fp8_tensor and nvfp4. None: the amax of the given operand."""
Rotations = tuple[Rotation | None, Rotation | None]
"""How the two operands of wgrad are transformed, in formats that do so. None: without sign changes."""


def fprop(
    x: Tensor,
    w: Tensor,
    fmt: Format | str,
    *,
    amax: Amaxes = (None, None),
    quantised: tuple[bool, bool] = (False, False),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute Y = Q(X)·Q(W)ᵀ [T, N].

    Args:
        x: fp32, bf16 or fp16 [T, K]; T may be 0.
        w: fp32, bf16 or fp16 [N, K].
        fmt: the format. bf16 means a plain product in the operands' dtype, without quantisation.
        amax: see :data:`Amaxes`, for (x, w).
        quantised: whether ``x`` and ``w`` are Q(X) and Q(W) in FP32 already.
        out_dtype: dtype of the result; default that of ``x``.

    Raises:
        SnipError: unknown format, dtype or number of dimensions. :func:`dgrad` and :func:`wgrad` raise it likewise.
    """
    if fmt == Format.BF16:
        return (x @ w.t()).to(out_dtype or x.dtype)
    left = x if quantised[0] else _operand(x, fmt, 1, None, amax[0])
    right = w if quantised[1] else _operand(w, fmt, 1, None, amax[1], weight=True)
    return (left @ right.t()).to(out_dtype or x.dtype)


def dgrad(
    g: Tensor,
    w: Tensor,
    fmt: Format | str,
    *,
    seed: Key | None = None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    amax: Amaxes = (None, None),
    quantised: tuple[bool, bool] = (False, False),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute D = Q(G)·Q(W) [T, K] for G [T, N], in tiles along N, and W [N, K].

    Args:
        g: G [T, N].
        w: W [N, K].
        fmt: as in :func:`fprop`.
        seed: key of stochastic rounding. The formats that use it require it.
        offset, rows, cols: global positions of G's elements. See :func:`snip_megatron.quantization.fake_quantize`.
        amax: see :data:`Amaxes`, for (g, w).
        quantised: whether ``g`` and ``w`` are Q(G) and Q(W) in FP32 already.
        out_dtype: dtype of the result; default that of ``g``.
    """
    if fmt == Format.BF16:
        return (g @ w).to(out_dtype or g.dtype)
    left, right = g, w
    if not quantised[0]:
        left = _operand(g, fmt, 1, None, amax[0], **gradient_rounding(fmt, seed, offset, rows, cols))
    if not quantised[1]:
        # Axis 0 (along N, the reduction) applies to formats whose weights have no square blocks.
        right = _operand(w, fmt, 0, None, amax[1], weight=True)
    return (left @ right).to(out_dtype or g.dtype)


def wgrad(
    g: Tensor,
    x: Tensor,
    fmt: Format | str,
    *,
    seed: Key | None = None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    amax: Amaxes = (None, None),
    rotation: Rotations = (None, None),
    quantised: tuple[bool, bool] = (False, False),
    out: Tensor | None = None,
) -> Tensor:
    """Compute ∇W = Q(G)ᵀ·Q(X), FP32 [N, K], with both operands in tiles along T.

    Args:
        g: G [T, N].
        x: X [T, K].
        fmt: as in :func:`fprop`, but bf16 multiplies in FP32.
        seed, offset, rows, cols: as in :func:`dgrad`.
        amax: see :data:`Amaxes`, for (g, x).
        rotation: see :data:`Rotations`, for (g, x).
        quantised: whether ``g`` and ``x`` are Q(G) and Q(X) in FP32 already.
        out: FP32 or bf16 [N, K] (``main_grad``) to accumulate into, which is then returned. The sum is rounded once.
    """
    if fmt == Format.BF16:
        # Products of bf16 numbers are exact in FP32. Accumulating in bf16 would lose most of a small gradient.
        left, right = g.to(torch.float32), x.to(torch.float32)
    else:
        left, right = g, x
        if not quantised[0]:
            left = _operand(g, fmt, 0, rotation[0], amax[0], **gradient_rounding(fmt, seed, offset, rows, cols))
        if not quantised[1]:
            right = _operand(x, fmt, 0, rotation[1], amax[1])
    if out is not None and out.dtype is torch.float32:
        return out.addmm_(left.t(), right)
    product = left.t() @ right
    return product if out is None else out.add_(product)  # added in FP32


def _operand(
    x: Tensor,
    fmt: Format | str,
    axis: int,
    rotation: Rotation | None,
    amax: Tensor | None,
    *,
    weight: bool = False,
    **rounding: Any,
) -> Tensor:
    """Return Q(x), or Q of its transform, for a GEMM that reduces over ``axis``."""
    x, amax = turned(x, fmt, axis, rotation, amax, weight=weight)
    return fake_quantize(x, fmt, axis=axis, block=weight, tensor_amax=amax, **rounding)


def gradient_rounding(
    fmt: Format | str,
    seed: Key | None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
) -> dict[str, Any]:
    """Return the rounding arguments of ``fake_quantize`` for G: stochastic in the formats of ``STOCHASTIC``."""
    if resolve(fmt) not in STOCHASTIC:
        return {}
    return {"rounding": "stochastic", "seed": seed, "offset": offset, "rows": rows, "cols": cols}
