"""Sums of squares: the currency of all statistics."""

from __future__ import annotations

import torch


def sum_squares(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Σ x², accumulated in float64, over everything or over ``dim``; float64, on x's device."""
    squares = x.float().square()
    return squares.sum(dtype=torch.float64) if dim is None else squares.sum(dim=dim, dtype=torch.float64)


def sample_rows(total: int, count: int) -> torch.Tensor:
    """Evenly spread row indices, int64 [min(total, count)]: the same for every layout of the same tokens."""
    count = min(total, count)
    return torch.arange(count) * total // max(count, 1)
