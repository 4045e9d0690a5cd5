"""Sums of squares, and the rows that statistics sample.

The Triton kernels sum where these run, otherwise plain torch, which is their reference.
"""

import functools
from types import ModuleType

import torch

from snip_megatron.numerics.quantize.device_keys import has_kernels
from snip_megatron.sensitivity import errors


def sum_squares(x: torch.Tensor) -> torch.Tensor:
    """Return Σ x², accumulated in float64, 0-dim float64 on the device of ``x``."""
    total: torch.Tensor = implementation(x).sum_squares(x)
    return total


def implementation(x: torch.Tensor) -> ModuleType:
    """Return the module that sums on the device of x: the kernels, imported only where they run, or the reference."""
    if not has_kernels(x):
        return errors
    from snip_megatron.sensitivity.kernels import sums

    return sums


@functools.lru_cache(maxsize=64)
def sample_rows(total: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """Return evenly spread row indices, int64 [min(total, count)]. Every layout of the same tokens gets the same ones.

    The result is cached on ``device``, because a copy to a GPU waits for all work that runs there. Do not write to it.
    """
    count = min(total, count)
    return torch.arange(count, device=device) * total // max(count, 1)
