"""Rows of experts padded with zeros, so that every expert has a multiple of the rows that grouped products need.

Megatron pads for its own FP8 and FP4 only. Padding stands at the two ends of an MLP of experts: whatever lies between
reads and writes padded rows, and costs no pass of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snip_megatron.errors import SnipError


class PaddedSplits(list[int]):
    """Numbers of rows of the experts with their padding, as a linear of experts takes them.

    Attributes:
        backwards: whether the last expert comes first. Megatron lays parameters and gradients of a model out from the
            last one on, so that rows in this order meet weights in the order of their memory.
        positions: the padded row of every row, int64 [rows].
    """

    def __init__(self, splits: Sequence[int], multiple: int, *, backwards: bool, device: torch.device) -> None:
        padded = [-(-count // multiple) * multiple for count in splits]
        super().__init__(reversed(padded) if backwards else padded)
        self.backwards = backwards
        self.positions = _positions(tuple(splits), tuple(padded), backwards, device)

    def tolist(self) -> PaddedSplits:
        """Return this object: Megatron's experts ask a tensor for its list."""
        return self

    def pad(self, x: Tensor) -> Tensor:
        """Return x [rows, ...] with zero rows between experts."""
        padded: Tensor = _Pad.apply(x, self.positions, sum(self))  # type: ignore[no-untyped-call]
        return padded

    def unpad(self, x: Tensor) -> Tensor:
        """Return the rows that :meth:`pad` was given, in their order."""
        rows: Tensor = _Unpad.apply(x, self.positions)  # type: ignore[no-untyped-call]
        return rows


@functools.lru_cache(maxsize=4)
def _positions(splits: tuple[int, ...], padded: tuple[int, ...], backwards: bool, device: torch.device) -> Tensor:
    counts = torch.tensor([splits, padded])
    first, start = counts.cumsum(1) - counts
    if backwards:
        start = sum(padded) - start - counts[1]
    moved = torch.stack([start - first, counts[0]]).to(device, non_blocking=True)
    rows = sum(splits)
    shifts = torch.repeat_interleave(moved[0], moved[1], output_size=rows)
    return torch.arange(rows, device=device) + shifts


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(positions)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, positions, x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return grad_outputs[0].index_select(0, *ctx.saved_tensors), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.rows = x.shape[0]
        return x.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        (positions,), g = ctx.saved_tensors, grad_outputs[0]
        return g.new_zeros(ctx.rows, *g.shape[1:]).index_copy_(0, positions, g), None


def refuse_second_derivatives() -> None:
    """Raise SnipError in a backward that is to be differentiated. torch's once_differentiable takes more time."""
    if torch.is_grad_enabled():
        raise SnipError("create_graph=True is not supported, because rounding has no derivative")
