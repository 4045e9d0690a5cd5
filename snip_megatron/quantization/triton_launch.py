"""Launching a Triton kernel again with arguments of the same kind, without Triton's own look at each of them.

Triton looks at every argument of every launch to find the compiled kernel, which costs the host more than the launch
itself. Here the kernel of a call is remembered by what Triton's choice depends on: the numbers themselves, the type,
device and alignment of tensors, the constants and the options.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KEPT = 4096
_ALIGNED = 16  # bytes; Triton compiles another kernel for pointers that are not
_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    dtypes: tuple[torch.dtype, ...],
    numbers: tuple[int, ...],
    counters: tuple[int, ...],
    constants: Mapping[str, object],
    options: Mapping[str, int],
) -> None:
    """``kernel[grid](*tensors, *numbers, *counters, **constants, **options)`` on the first tensor's device.

    Args:
        kernel: its parameters in this order: tensors, numbers, counters, constants, all without defaults.
        dtypes: what the kernel takes each tensor's memory for: its own dtype, or one it can be viewed as.
        numbers: few different ones in a run (sizes and strides): a kernel is remembered for each.
        counters: any number of different ones; the kernel does not specialise on them (``do_not_specialize``).
        constants: compile-time constants, in the order of the kernel's parameters.
        options: Triton's launch options.
    """
    device = tensors[0].get_device()
    with torch.cuda.device(device) if device >= 0 and device != torch.cuda.current_device() else _HERE:
        pointers = [t.data_ptr() for t in tensors]
        values = tuple(constants.values())
        key = (
            kernel, dtypes, numbers, values, tuple(options.values()), tuple([t.get_device() for t in tensors]),
            _all_aligned(pointers) or tuple([p % _ALIGNED == 0 for p in pointers]),
            _all_short(counters) or tuple([-(1 << 31) <= c < 1 << 31 for c in counters]),
        )  # fmt: skip
        found = _compiled.get(key)
        if found is not None:  # addresses instead of tensors: Triton asks the driver about each of those
            found[(*grid, 1)](*pointers, *numbers, *counters, *values)
            return
        viewed = [t if t.dtype is dtype else t.view(dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
        made = kernel[grid](*viewed, *numbers, *counters, **constants, **options)
        if made is not None and len(_compiled) < _KEPT:  # Triton's interpreter compiles nothing
            _compiled[key] = made


def _all_aligned(pointers: list[int]) -> bool:
    return functools.reduce(operator.or_, pointers) % _ALIGNED == 0


def _all_short(counters: tuple[int, ...]) -> bool:
    return not counters or (min(counters) >= -(1 << 31) and max(counters) < 1 << 31)


class _Here:
    """A context that does nothing, without contextlib's cost."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


_HERE = _Here()
