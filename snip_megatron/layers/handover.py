"""Operands that a fused kernel has quantised, handed to a linear beside autograd.

Autograd passes one tensor from a function to the next. The operands of two GEMMs are four, of other dtypes. So a fused
function passes a tensor of the right shape without numbers of its own, and the operands go with it: in a forward as an
attribute of that tensor, in a backward on the graph node that receives it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import Sides
from snip_megatron.precision import LinearId

_SIDES = "snip_sides"


def nothing(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of ``shape`` whose elements are one NaN in memory, so that a use of them is noticed."""
    return _nan(like.dtype, like.device).expand(shape)


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


def check_nothing(x: torch.Tensor, what: str) -> None:
    """Check that x is a tensor of :func:`nothing`.

    Raises:
        SnipError: autograd has added another gradient to it, which would be lost.
    """
    if any(x.stride()):
        raise SnipError(
            f"{what} has a part from outside of the fused functions, which --snip-fusions auto does not support;"
            " use --snip-fusions none"
        )


def hand_over(x: torch.Tensor, sides: Sides) -> torch.Tensor:
    """Return x, with the operands that the linear which gets it will use."""
    setattr(x, _SIDES, sides)
    return x


def handed_over(x: torch.Tensor, linear: LinearId) -> Sides | None:
    """Return the operands that came with x, the input of a linear, or None.

    Raises:
        SnipError: x is a tensor of :func:`nothing` that has lost its operands.
    """
    sides: Sides | None = getattr(x, _SIDES, None)
    if sides is None and x.numel() and not any(x.stride()) and x[(0,) * x.dim()].isnan():
        raise SnipError(
            f"{linear}: its input was replaced, as a hook of the linear does, which --snip-fusions auto does not"
            " support; use --snip-fusions none"
        )
    return sides
