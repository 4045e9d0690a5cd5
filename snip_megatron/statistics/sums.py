"""Sums of squares by the Triton kernels where these run, otherwise by plain torch."""

from __future__ import annotations

import functools
import importlib.util

import torch

from snip_megatron.statistics.squares import squares


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
