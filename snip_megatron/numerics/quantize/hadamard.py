"""The Hadamard transform of wgrad's operands along the tokens.

In ∇W = Gᵀ·X both operands are multiplied by the same orthogonal matrix, H₁₆/4 for each group of 16 tokens, which does
not change the product. It spreads an outlier over its group, so that the tiles are quantised with smaller errors. Each
row of a group may first be multiplied by ±1. An incomplete last group is padded with zeros, which adds nothing to the
product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.numerics.quantize.formats import SPECS, resolve
from snip_megatron.precision import Format

POINTS = 16
"""Rows of a group."""

Signs = int | Tensor
"""A number in [0, 2^16), or an int32 tensor [1] on the device. If bit i is set, row i of every group changes its sign.
"""


@dataclass(frozen=True)
class Rotation:
    """How an operand of wgrad is transformed.

    Attributes:
        signs: sign changes, which must be the same for both operands of a product.
        amax: 0-dim FP32 max|·| of the transformed unsharded matrix if a shard is transformed, for formats with a scale
            for the whole tensor. None: that of the transformed matrix itself.
    """

    signs: Signs = 0
    amax: Tensor | None = None


ROTATED = frozenset(fmt for fmt, spec in SPECS.items() if spec.hadamard)
"""Formats in which the operands of wgrad are transformed."""


def is_turned(format: Format | str | None, axis: int, *, weight: bool = False) -> bool:
    """Return whether an operand of a GEMM that reduces over ``axis`` (0 or 1) is transformed. Weights never are."""
    return format is not None and axis == 0 and not weight and SPECS[resolve(format)].hadamard


def rotate(x: Tensor, signs: Signs = 0) -> Tensor:
    """Transform groups of 16 rows of x [R, C].

    Returns:
        FP32 [⌈R/16⌉·16, C]. Sums are formed in FP32 between rows 8, 4, 2 and 1 apart, in this order, so that kernels
        find the same bits.
    """
    x = functional.pad(x.detach().to(torch.float32), (0, 0, 0, -x.shape[0] % POINTS))
    groups, cols = x.shape[0] // POINTS, x.shape[1]
    word = signs.long() if isinstance(signs, Tensor) else signs
    flips = torch.bitwise_right_shift(word, torch.arange(POINTS, device=x.device)) & 1
    x = x.view(groups, POINTS, cols) * (1 - 2 * flips).to(torch.float32)[:, None]
    for apart in (8, 4, 2, 1):
        first, second = x.view(groups, POINTS // (2 * apart), 2, apart, cols).unbind(2)
        x = torch.stack((first + second, first - second), 2)
    return x.view(groups * POINTS, cols).mul_(0.25)


def turned(
    x: Tensor,
    format: Format | str,
    axis: int,
    rotation: Rotation | None,
    amax: Tensor | None,
    *,
    weight: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the matrix that ``format`` quantises for a GEMM that reduces over ``axis``, and the amax of its tensor.

    ``rotation`` says how ``x`` [R, C] is transformed if ``format`` does, None: without sign changes. ``amax`` is max|x|
    of the unsharded matrix if it is not transformed, None: that of ``x``, which may be a ``weight``.
    """
    if not is_turned(format, axis, weight=weight):
        return x, amax
    rotation = rotation or Rotation()
    return rotate(x, rotation.signs), rotation.amax
