"""The Hadamard transforms of operands along the dimension that their GEMM reduces over.

Both operands of a product are multiplied by the same orthogonal matrix, which does not change the product. It spreads
an outlier over its group, so that the tiles are quantised with smaller errors. Each number of a group may first be
multiplied by ±1. An incomplete last group is padded with zeros, which adds nothing to the product.

The 16-point transform, H₁₆/4, is that of wgrad's operands along the tokens: ∇W = Gᵀ·X. The 128-point transform,
H₁₂₈/√128, is that of all operands of nvfp4_eden, whose scales are drawn too (``eden.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import SPECS, resolve
from snip_megatron.quantization.rounding import MASK32, ROW_STEP, mix32

SIGN_STREAM = 0x5F356495
_FACTORS = {16: 0.25, 128: 128**-0.5}

Signs = int | Tensor
"""The key of a transform: a number in [0, 2^31), or an int32 tensor [1] on the device.

With 16 points, bit i is set if number i of every group changes its sign. With 128 points the signs are hashes of the
key, and so are the draws of EDEN.
"""
SIGN_BITS = 31


@dataclass(frozen=True)
class Rotation:
    """How one operand is transformed.

    Attributes:
        signs: sign changes, which must be the same for both operands of a product.
        amax: 0-dim FP32 max|·| of the transformed unsharded matrix if a shard is transformed, for formats with a scale
            for the whole tensor. None: that of the transformed matrix itself.
        row: where a matrix is quantised for two GEMMs, the rotation of the operand of the one that reduces over the
            columns. The other attributes are those of the one that reduces over the rows.
    """

    signs: Signs = 0
    amax: Tensor | None = None
    row: Rotation | None = None

    def of(self, axis: int) -> Rotation | None:
        """Return the rotation of the operand of the GEMM that reduces over ``axis`` (0 or 1)."""
        return self.row if axis else replace(self, row=None)


ROTATED = frozenset(fmt for fmt, spec in SPECS.items() if spec.hadamard)
"""Formats in which operands are transformed."""


def points(format: Format | str | None, axis: int, *, weight: bool = False) -> int:
    """Return the points of the transform of an operand in ``format`` along ``axis`` (0 or 1), or 0 for no transform."""
    if format is None or format not in ROTATED:
        return 0
    size = SPECS[resolve(format)].hadamard
    return 0 if size == 16 and (axis == 1 or weight) else size


def rotate(x: Tensor, signs: Signs = 0, size: int = 16, axis: int = 0) -> Tensor:
    """Transform groups of ``size`` rows, or columns with ``axis`` 1.

    Args:
        x: fp32, bf16 or fp16 [R, C].
        signs: sign changes.
        size: points of the transform, 16 or 128.
        axis: 0 or 1.

    Returns:
        FP32 [⌈R/size⌉·size, C], or [R, ⌈C/size⌉·size]. Sums are formed in FP32 between rows size/2, …, 2 and 1 apart,
        in this order, so that kernels find the same bits.
    """
    if axis:
        return rotate(x.t(), signs, size).t().contiguous()
    x = functional.pad(x.detach().to(torch.float32), (0, 0, 0, -x.shape[0] % size))
    groups, cols = x.shape[0] // size, x.shape[1]
    x = x.view(groups, size, cols) * (1 - 2 * _flips(signs, size, x.device)).to(torch.float32)[:, None]
    apart = size // 2
    while apart:
        first, second = x.view(groups, size // (2 * apart), 2, apart, cols).unbind(2)
        x = torch.stack((first + second, first - second), 2)
        apart //= 2
    return x.view(groups * size, cols).mul_(_FACTORS[size])


def _flips(signs: Signs, size: int, device: torch.device) -> Tensor:
    """Return 1 for the numbers of a group that change their sign, otherwise 0, int64 [size]."""
    places = torch.arange(size, device=device)
    word = signs.long() if isinstance(signs, Tensor) else signs
    if size == 16:
        return torch.bitwise_right_shift(word, places) & 1
    return mix32((places * ROW_STEP + (word ^ SIGN_STREAM)) & MASK32) >> 31


def turned(
    x: Tensor,
    format: Format | str,
    axis: int,
    rotation: Rotation | None,
    amax: Tensor | None,
    *,
    weight: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the matrix that ``format`` quantises for a GEMM that reduces over ``axis``, and options of the quantiser.

    Args:
        x: the operand [R, C].
        format: a quantised format.
        axis: 0 or 1.
        rotation: how ``x`` is transformed if ``format`` has a transform; None: with the key 0.
        amax: max|x| of the unsharded matrix if it is not transformed; None: that of ``x``.
        weight: whether ``x`` is a weight, which the 16-point transform leaves as it is.

    Returns:
        ``x`` or its transform, and ``tensor_amax`` and, for EDEN, ``rounding`` and ``seed`` of
        :class:`snip_megatron.quantization.reference.QuantizeOptions`.
    """
    size = points(format, axis, weight=weight)
    if not size:
        return x, {"tensor_amax": amax}
    rotation = rotation or Rotation()
    options: dict[str, Any] = {"tensor_amax": rotation.amax}
    if SPECS[resolve(format)].eden:
        options |= {"rounding": "stochastic", "seed": rotation.signs}
    return rotate(x, rotation.signs, size, axis), options
