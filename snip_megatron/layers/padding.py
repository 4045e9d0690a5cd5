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
        rows: the number of rows without padding.
        block: the number of which those of each expert are a multiple, a multiple of 16.
        table: int32 [2, blocks] on the device: for each block of padded rows, the row that its first one was, and how
            many of it are no padding.
    """

    def __init__(self, splits: Sequence[int], multiple: int, *, backwards: bool, device: torch.device) -> None:
        padded = [-(-count // multiple) * multiple for count in splits]
        super().__init__(reversed(padded) if backwards else padded)
        self.backwards, self.rows, self.block = backwards, sum(splits), multiple
        self.table = _table(tuple(splits), multiple, backwards, device)

    def tolist(self) -> PaddedSplits:
        """Return this object: Megatron's experts ask a tensor for its list."""
        return self

    def pad(self, x: Tensor) -> Tensor:
        """Return x [rows, ...] with zero rows between experts."""
        padded: Tensor = _Moved.apply(x, self, True)  # type: ignore[no-untyped-call]
        return padded

    def unpad(self, x: Tensor) -> Tensor:
        """Return the rows that :meth:`pad` was given, in their order."""
        rows: Tensor = _Moved.apply(x, self, False)  # type: ignore[no-untyped-call]
        return rows

    def moved(self, x: Tensor, *, pad: bool) -> Tensor:
        """Return x with padding, or without it."""
        to = x.new_empty(self.table.shape[1] * self.block if pad else self.rows, *x.shape[1:])
        if x.is_cuda:
            from snip_megatron.quantization.kernels.rows import move_rows

            move_rows(x.contiguous(), to, self.table, self.block, pad=pad)  # type: ignore[no-untyped-call]
            return to
        (first, count), within = self.table.unsqueeze(2), torch.arange(self.block)
        places = (within < count).flatten().nonzero()[:, 0]
        sources = (first + within).flatten()[places]
        if pad:
            return to.zero_().index_copy_(0, places, x[sources])
        return to.index_copy_(0, sources, x[places])


@functools.lru_cache(maxsize=4)
def _table(splits: tuple[int, ...], multiple: int, backwards: bool, device: torch.device) -> Tensor:
    counts = torch.tensor(splits)
    described = torch.stack([counts.cumsum(0) - counts, counts, -(-counts // multiple)])
    starts, counts, blocks = described.flip(1) if backwards else described
    before = (torch.arange(int(blocks.sum())) - torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)) * multiple
    first = torch.repeat_interleave(starts, blocks) + before
    count = (torch.repeat_interleave(counts, blocks) - before).clamp(max=multiple)
    return torch.stack([first, count]).to(torch.int32).to(device, non_blocking=True)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: PaddedSplits, pad: bool) -> Tensor:
        ctx.splits, ctx.pad = splits, pad
        return splits.moved(x, pad=pad)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives()
        return ctx.splits.moved(grad_outputs[0], pad=not ctx.pad), None, None


def refuse_second_derivatives() -> None:
    """Raise SnipError in a backward that is to be differentiated. torch's once_differentiable takes more time."""
    if torch.is_grad_enabled():
        raise SnipError("create_graph=True is not supported, because rounding has no derivative")
