"""Triton kernels of the quantisers, and how the host launches them.

Triton runs on CUDA, or on a CPU with ``TRITON_INTERPRET=1`` (slow; for tests). Elsewhere only ``launch.py`` and
``replay.py`` of this package are imported.
"""

import functools
import importlib.util

from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(x: Tensor) -> bool:
    """Return whether the package's Triton kernels run on the device of ``x``."""
    return x.is_cuda and has_triton()
