"""Where the rows of experts stand in a matrix that ends each expert's rows with zeros, and in one without them."""

from typing import NamedTuple

import torch
from torch import Tensor


class RowMap(NamedTuple):
    """Places of the rows of experts. ``kernels/rows.py`` has its functions in Triton.

    Attributes:
        experts: int32 [padded rows], the expert of every padded row, ascending. Every expert has a multiple of 128.
        table: int32 [4, experts], of every expert its first padded row, its first row without padding, its number of
            rows without padding, and the row after its last padded one.
    """

    experts: Tensor
    table: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """Return x [rows, ...], which has no padding, with zero rows after the rows of each expert."""
        own, rows = self._places()
        padded = x.new_zeros(len(own), *x.shape[1:])
        padded[own] = x[rows]
        return padded

    def unpad(self, padded: Tensor, rows: int) -> Tensor:
        """Return the ``rows`` rows that :meth:`pad` was given, in their order."""
        own, places = self._places()
        x = padded.new_empty(rows, *padded.shape[1:])
        x[places] = padded[own]
        return x

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return which padded rows are no padding, and which rows they are."""
        start, first, count, _ = self.table[:, self.experts.long()]
        place = torch.arange(len(start), device=start.device) - start
        own = place < count
        return own, (first + place)[own]
