"""Sums of squares: the currency of all statistics."""

from __future__ import annotations

import functools
import importlib.util

import torch


def has_kernels(x: torch.Tensor) -> bool:
    """Whether the Triton kernels of this package run where ``x`` is."""
    return x.is_cuda and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def sum_squares(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Σ x², accumulated in float64, over everything or over ``dim``; float64, on x's device."""
    if dim is None and has_kernels(x):
        from snip_megatron.statistics import triton_sums

        return triton_sums.sum_squares(x)
    squares = x.float().square()
    return squares.sum(dtype=torch.float64) if dim is None else squares.sum(dim=dim, dtype=torch.float64)


@functools.lru_cache(maxsize=64)
def sample_rows(total: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """Evenly spread row indices, int64 [min(total, count)]: the same for every layout of the same tokens.

    Kept on ``device`` and not to be written to: a copy to a GPU would wait for all that runs there.
    """
    count = min(total, count)
    return torch.arange(count, device=device) * total // max(count, 1)
