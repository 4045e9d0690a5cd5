"""Sums of squares, and the rows that statistics sample.

The Triton kernels sum where these run, otherwise plain torch, which is their reference.
"""

import functools
import importlib.util

import torch

from snip_megatron.statistics.errors import squares


def has_kernels(x: torch.Tensor) -> bool:
    """Whether the Triton kernels of this package run on the device of ``x``."""
    return x.is_cuda and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def sum_squares(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return Σ x², accumulated in float64, over everything or over ``dim``; float64, on the device of ``x``."""
    if dim is None and has_kernels(x):
        from snip_megatron.statistics.kernels import sums

        return sums.sum_squares(x)
    return squares(x, dim)


@functools.lru_cache(maxsize=64)
def sample_rows(total: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """Return evenly spread row indices, int64 [min(total, count)]. Every layout of the same tokens gets the same ones.

    The result is cached on ``device``, because a copy to a GPU waits for all work that runs there. Do not write to it.
    """
    count = min(total, count)
    return torch.arange(count, device=device) * total // max(count, 1)
