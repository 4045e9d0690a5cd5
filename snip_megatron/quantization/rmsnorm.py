"""RMSNorm, quantised for the GEMMs that read it. ``kernels/rmsnorm.py`` has these functions in Triton.

RMSNorm of x is γ·x / sqrt(mean(x²) + ε). The sum over a row depends on the order of its additions, so that the bits of
another library's norm are those of its order. :class:`Order` describes the orders that occur.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.packed import Operands, quantize_tiles

LANES = 32
"""Threads of a warp."""


@dataclass(frozen=True)
class Order:
    """The order in which the threads of a kernel add up a row.

    A thread reads ``vector`` adjacent elements, and then those that lie ``vector`` × (number of threads) further on,
    until the end of the row. It adds them in this order, and adds squares by fused multiply-adds. The sums of two
    threads, and then of two warps, are added until one remains.

    Attributes:
        vector: number of adjacent elements, 4 or 8.
        warps: number of warps of a row, 1 or 4.
        centred: the mean is computed first, and squared deviations from it are added; mean(x²) follows from both. Sums
            of neighbouring threads are added first. Otherwise squares are added, and sums of threads that lie half a
            warp apart are added first. Sums of warps that lie half the row's warps apart are added first in both.
        rows: the order holds for matrices whose number of rows is a multiple of this one.
    """

    vector: int
    warps: int
    centred: bool
    rows: int = 1

    def holds(self, rows: int, features: int) -> bool:
        """Return whether the order is that of a matrix [rows, features]."""
        return rows % self.rows == 0 and features % (self.vector * self.warps * LANES) == 0


@dataclass(frozen=True)
class RMSNorm:
    """A rule of RMSNorm.

    Attributes:
        order: the order of the additions.
        eps: ε.
        zero_centred: whether γ is 1 + weight. Otherwise it is the weight.
    """

    order: Order
    eps: float
    zero_centred: bool = False


def fits(x: Tensor, gamma: Tensor, norm: RMSNorm) -> bool:
    """Return whether the functions below take x [M, K] and the weight [K] of the norm. The kernels take fewer."""
    return norm.order.holds(*x.shape)


def reciprocal_rms(x: Tensor, norm: RMSNorm) -> Tensor:
    """Return 1 / sqrt(mean(x²) + ε) of each row of x [M, K], FP32 [M].

    A fused multiply-add is computed in float64 and rounded to FP32. It is rounded twice in rare cases, in which a GPU
    gives another last bit. The reciprocal square root is the device's.
    """
    features, order = x.shape[1], norm.order
    warps = x.float().view(len(x), -1, order.warps, LANES, order.vector).permute(0, 2, 3, 1, 4)
    own = warps.reshape(len(x), order.warps, LANES, features // (order.warps * LANES))  # elements of each thread
    if not order.centred:
        squares = _halves(_halves(_squares(own)))
        return torch.rsqrt(squares / torch.full_like(squares, features) + norm.eps)
    mean = _neighbours(_in_order(own)) * fp32_reciprocal(features // order.warps)
    squares = _neighbours(_squares(own - mean[:, :, None, None]))
    of_warp = features // order.warps
    while mean.shape[1] > 1:
        (mean, others), (squares, other_squares) = mean.chunk(2, 1), squares.chunk(2, 1)
        between = mean - others
        squares = _fma(between * between, torch.full_like(mean, 0.5 * of_warp), squares + other_squares)
        mean, of_warp = (mean + others) * 0.5, 2 * of_warp
    mean, squares = mean[:, 0], squares[:, 0]
    return torch.rsqrt(_fma(mean, mean, squares * fp32_reciprocal(features)) + norm.eps)


def rmsnorm(x: Tensor, gamma: Tensor, rs: Tensor, norm: RMSNorm) -> Tensor:
    """Return RMSNorm [M, K] of x in x's dtype, computed in FP32 and rounded once.

    Args:
        x: [M, K].
        gamma: the weight [K].
        rs: :func:`reciprocal_rms` of x.
        norm: the rule."""
    factor = gamma.float() + 1.0 if norm.zero_centred else gamma.float()
    return (rs[:, None] * x.float() * factor).to(x.dtype)


def quantize_rmsnorm(
    x: Tensor, gamma: Tensor, rs: Tensor, norm: RMSNorm, row_format: Format | None, col_format: Format | None
) -> Operands:
    """Quantise RMSNorm [M, K] of x in 1×128 tiles along K and along M, each in a format of its own.

    Args:
        x, gamma, rs, norm: as in :func:`rmsnorm`.
        row_format, col_format: fp8, fp4, or None to leave that operand out."""
    return quantize_tiles(rmsnorm(x, gamma, rs, norm), row_format, col_format)


def fp32_reciprocal(number: int) -> float:
    """Return 1 / number rounded to FP32, by which kernels multiply."""
    return float(np.float32(1) / np.float32(number))


def _in_order(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[..., 0])
    for element in x.unbind(-1):
        total = total + element
    return total


def _squares(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[..., 0])
    for element in x.unbind(-1):
        total = _fma(element, element, total)
    return total


def _neighbours(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _halves(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x[..., 0]


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()
