"""The 16-point Hadamard transform of wgrad's operands along the tokens.

wgrad sums over tokens, ∇W = Gᵀ·X. Both operands are multiplied from the left by the same orthogonal matrix, which does
not change the product. It spreads an outlier of one token over the 16 tokens of its group, so that the tiles are
quantised with smaller errors. The matrix is H₁₆/4 for each group. With random signs, each token of a group is first
multiplied by ±1. An incomplete last group is padded with zeros, which adds nothing to the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import SPECS

POINTS = 16
"""Tokens of a group."""

Signs = int | Tensor
"""Which tokens of every group of 16 change their sign: bit i is set for token i. A number in [0, 2^16), or an int32
tensor [1] on the device.
"""


@dataclass(frozen=True)
class Rotation:
    """How one operand of a wgrad is transformed.

    Attributes:
        signs: sign changes, which must be the same for both operands of a product.
        amax: 0-dim FP32 max|·| of the transformed unsharded matrix if a shard is transformed, for formats with a scale
            for the whole tensor. None: that of the transformed matrix itself.
    """

    signs: Signs = 0
    amax: Tensor | None = None


ROTATED = frozenset(fmt for fmt, spec in SPECS.items() if spec.hadamard)
"""Formats in which the operands of a wgrad are transformed."""


def rotate(x: Tensor, signs: Signs = 0) -> Tensor:
    """Transform groups of 16 rows.

    Args:
        x: fp32, bf16 or fp16 [T, C].
        signs: sign changes.

    Returns:
        FP32 [⌈T/16⌉·16, C]. Sums are formed in FP32 between rows 8, 4, 2 and 1 apart, in this order, so that kernels
        find the same bits.
    """
    x = functional.pad(x.detach().to(torch.float32), (0, 0, 0, -x.shape[0] % POINTS))
    groups, cols = x.shape[0] // POINTS, x.shape[1]
    bits = torch.arange(POINTS, device=x.device)
    flips = torch.bitwise_right_shift(signs.long() if isinstance(signs, Tensor) else signs, bits) & 1
    x = x.view(groups, POINTS, cols) * (1 - 2 * flips).to(torch.float32)[:, None]
    for apart in (8, 4, 2, 1):
        first, second = x.view(groups, POINTS // (2 * apart), 2, apart, cols).unbind(2)
        x = torch.stack((first + second, first - second), 2)
    return x.view(groups * POINTS, cols).mul_(0.25)


def wgrad_operand(
    x: Tensor, format: Format | str, rotation: Rotation | None, amax: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the matrix that ``format`` quantises for a wgrad, and the max|·| of the unsharded matrix.

    If ``format`` has a Hadamard transform, the matrix is ``x`` [T, C] transformed by ``rotation``, or without sign
    changes if ``rotation`` is None. Otherwise ``x`` and ``amax`` are returned.
    """
    if format not in ROTATED:
        return x, amax
    rotation = rotation or Rotation()
    return rotate(x, rotation.signs), rotation.amax
