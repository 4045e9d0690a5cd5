"""Sums of squares in plain torch, which are the reference of the kernels, and the rows that statistics sample."""

from __future__ import annotations

import functools

import torch


def squares(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return Σ x², accumulated in float64, over everything or over ``dim``; float64, on the device of ``x``."""
    return (
        x.float().square().sum(dtype=torch.float64) if dim is None else x.float().square().sum(dim, dtype=torch.float64)
    )


@functools.lru_cache(maxsize=64)
def sample_rows(total: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """Return evenly spread row indices, int64 [min(total, count)]. Every layout of the same tokens gets the same ones.

    The result is cached on ``device``, because a copy to a GPU waits for all work that runs there. Do not write to it.
    """
    count = min(total, count)
    return torch.arange(count, device=device) * total // max(count, 1)
