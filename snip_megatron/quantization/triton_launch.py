"""Launching a Triton kernel again with arguments of the same kind, without Triton's own look at each of them.

Triton looks at every argument of every launch to find the compiled kernel, which costs the host more than the launch
itself. Here the kernel of a call is remembered by what Triton's choice depends on: the numbers themselves, the type and
the alignment of tensors, the constants and the options.
"""

from __future__ import annotations

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
    numbers: tuple[int, ...],
    counters: tuple[int, ...],
    constants: Mapping[str, object],
    options: Mapping[str, int],
) -> None:
    """``kernel[grid](*tensors, *numbers, *counters, **constants, **options)`` on the tensors' device.

    Args:
        kernel: its parameters in this order: tensors, numbers, counters, constants, all without defaults.
        numbers: few different ones in a run (sizes and strides): a kernel is remembered for each.
        counters: any number of different ones; the kernel does not specialise on them (``do_not_specialize``).
        constants: compile-time constants, in the order of the kernel's parameters.
        options: Triton's launch options.
    """
    device = tensors[0].device.index
    with torch.cuda.device(device) if device is not None and device != torch.cuda.current_device() else _HERE:
        key = (
            kernel, device, numbers, tuple(constants.values()), tuple(options.values()),
            tuple([(t.dtype, t.data_ptr() % _ALIGNED == 0) for t in tensors]),
            tuple([-(1 << 31) <= c < 1 << 31 for c in counters]),
        )  # fmt: skip
        found = _compiled.get(key)
        if found is not None:
            found[(*grid, 1)](*tensors, *numbers, *counters, *constants.values())
            return
        made = kernel[grid](*tensors, *numbers, *counters, **constants, **options)
        if made is not None and len(_compiled) < _KEPT:  # Triton's interpreter compiles nothing
            _compiled[key] = made


class _Here:
    """A context that does nothing, without contextlib's cost."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


_HERE = _Here()
