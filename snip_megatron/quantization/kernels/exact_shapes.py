"""Shapes of the launches of ``exact.py``: the one table to edit for another GPU (``emulated_sweep``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Shape:
    """How a kernel divides a matrix. A program has as many rows as the largest tile.

    Attributes:
        row: columns of a program on the row side, and neighbouring columns of a thread. With 16 of them a thread holds
            whole tiles of 16, and accesses memory in halves of a tile.
        col: the same on the col side and for square blocks. The quotient is a multiple of a program's threads, so that
            a thread holds whole columns.
        warps: warps of a program.
        steps: parts of a program, one below the other. What belongs to columns or to the tensor is computed once.
        registers: most registers of a thread; None lets the compiler choose.

    The numbers of columns are powers of two. They differ, because the compiler orders the numbers of both sides alike
    if their sizes are equal.
    """

    row: tuple[int, int]
    col: tuple[int, int]
    warps: int
    steps: int = 1
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps} | limit


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "tiles of 16": Shape((128, 8), (256, 2), 4, 4, 64),
        "tiles of 16, stochastic": Shape((128, 8), (256, 2), 4, 4),
        "tiles of 16, transformed": Shape((128, 8), (256, 2), 4, 4, 64),
        "tiles of 16, four over six": Shape((32, 16), (64, 2), 1, 4),
        "tiles of 32": Shape((128, 8), (256, 2), 4, 4),
        "tiles of 32, stochastic": Shape((128, 8), (256, 2), 4, 4),
        "tiles of 32, transformed": Shape((128, 8), (256, 2), 4, 4),
        "tiles of 128": Shape((128, 8), (128, 8), 8),
        "amax": Shape((512, 4), (512, 4), 4),
    }
)
"""Kind of a launch → its shape. :func:`kind_of` says which kind a launch is."""


def kind_of(rows: int, *, stochastic: bool, transformed: bool, four: bool) -> str:
    """Return the key of :data:`SHAPES` for a launch whose parts have ``rows`` rows."""
    if rows == 128:
        return "tiles of 128"
    end = ", four over six" if four and rows == 16 else ", stochastic" if stochastic else ""
    return f"tiles of {rows}" + (", transformed" if transformed else end)
