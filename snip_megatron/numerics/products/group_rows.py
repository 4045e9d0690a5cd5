"""The rows of experts, and their padding: grouped products need a multiple of 128 rows of every expert.

Megatron pads for its own FP8 and FP4 only. Here padding stands at the two ends of an MLP of experts: whatever lies
between reads and writes padded rows, and costs no pass of its own. Where an MLP is fused and formats allow it, X and G
are quantised into padded rows, and wgrad reads them as they are: only results are copied, to rows without padding.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels import has_kernels
from snip_megatron.numerics.quantize.operands import RowMap


class GroupRows(list[int]):
    """Numbers of rows of the experts with their padding, as a linear of experts takes them.

    Attributes:
        backwards: whether the last expert comes first. Megatron lays parameters and gradients of a model out from the
            last one on, so that rows in this order meet weights in the order of their memory.
        unpadded: number of rows without padding.
        moves: whether padding changes anything.
    """

    def __init__(self, counts: Sequence[int], device: torch.device, *, backwards: bool) -> None:
        own = np.array(counts, dtype=np.int64)  # faster than torch and than Python
        padded, firsts = own + TILE - 1 & -TILE, own.cumsum() - own
        if backwards:
            own, padded, firsts = own[::-1], padded[::-1], firsts[::-1]
        ends = padded.cumsum()
        super().__init__(padded.tolist())
        self.backwards = backwards
        self.unpadded = sum(counts)
        self.moves = backwards or self.unpadded != sum(self)
        self._table, self._device = np.array((ends - padded, firsts, own, ends), dtype=np.int32), device

    def tolist(self) -> "GroupRows":
        """Return this object: Megatron's experts ask a tensor for its list."""
        return self

    @functools.cached_property
    def map(self) -> RowMap:
        """Where the rows are, on the device: one copy to it and one launch."""
        table = torch.from_numpy(self._table).to(self._device, non_blocking=True)
        rows = sum(self)
        numbers = _numbers(1 << rows.bit_length(), self._device)[:rows]
        return RowMap(torch.searchsorted(table[3], numbers, right=True, out_int32=True), table)

    def pad(self, x: Tensor) -> Tensor:
        """Return x [rows, ...] with zero rows after those of each expert. Autograd does not see it."""
        return _functions(x).pad(self.map, x) if self.moves else x

    def unpad(self, x: Tensor) -> Tensor:
        """Return the rows that :meth:`pad` was given, in their order. Autograd does not see it."""
        return _functions(x).unpad(self.map, x, self.unpadded) if self.moves else x


def _functions(x: Tensor) -> Any:
    """Return what moves rows on the device of x."""
    if not has_kernels(x):
        return RowMap
    from snip_megatron.numerics.quantize.kernels import quantize

    return quantize


@functools.lru_cache(maxsize=16)  # a forward that is computed again has the same rows
def group_rows(counts: tuple[int, ...], device: torch.device, *, backwards: bool = False) -> GroupRows:
    """Return the rows of experts that have ``counts`` rows without padding."""
    return GroupRows(counts, device, backwards=backwards)


def rows_of(splits: Sequence[int], device: torch.device) -> GroupRows:
    """Return ``splits``, or the rows of experts that have so many and need no padding."""
    return splits if isinstance(splits, GroupRows) else group_rows(tuple(splits), device)


@functools.lru_cache(maxsize=4)
def _numbers(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)
