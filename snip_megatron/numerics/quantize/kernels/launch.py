"""Launches a compiled Triton kernel again without Triton's inspection of every argument.

Triton inspects every argument of every launch to find the compiled kernel, which takes more host time than the launch
itself. This module remembers the compiled kernel of a call under everything that Triton's choice depends on: the
numbers, the dtype, device and alignment of tensors, the constants and the options.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.kernels.listing import active
from snip_megatron.numerics.quantize.kernels.replay import recording

Seen = tuple[Tensor, torch.dtype]
"""A tensor, and the dtype as which a kernel sees it."""
_KEPT = 4096
_ALIGNED = 16  # bytes; Triton compiles another kernel for pointers that are not
_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    memory: Sequence[Tensor | Seen],
    numbers: tuple[int, ...],
    counters: tuple[float, ...],
    constants: Mapping[str, object],
    options: Mapping[str, int],
) -> None:
    """Run ``kernel[grid](*memory, *numbers, *counters, **constants, **options)``, or list it.

    The device is that of the first tensor.

    Args:
        kernel: a Triton kernel with parameters in this order: memory, numbers, counters, constants. None has a
            default.
        grid: numbers of programs.
        memory: tensors that the kernel reads and writes, with the dtype under which it sees them if it is another one.
        numbers: sizes and strides. A compiled kernel is remembered for each combination, so a run must have few.
        counters: numbers on which the kernel does not specialise (``do_not_specialize``, or real ones), so a run may
            have any number.
        constants: compile-time constants, in the order of the kernel's parameters.
        options: Triton's launch options.
    """
    tensors = [each if isinstance(each, Tensor) else each[0] for each in memory]
    dtypes = tuple([each.dtype if isinstance(each, Tensor) else each[1] for each in memory])
    device = tensors[0].get_device()
    with torch.cuda.device(device) if device >= 0 and device != torch.cuda.current_device() else _HERE:
        pointers = [t.data_ptr() for t in tensors]
        values = tuple(constants.values())
        key = (
            kernel, dtypes, numbers, values, tuple(options.values()), tuple([t.get_device() for t in tensors]),
            _all_aligned(pointers) or tuple([p % _ALIGNED == 0 for p in pointers]),
            _all_short(counters) or tuple([-(1 << 31) <= c < 1 << 31 for c in counters]),
        )  # fmt: skip
        listing = active()
        found = _compiled.get(key) if listing is None else None
        if found is not None:  # addresses instead of tensors: Triton asks the driver about each of those
            found[(*grid, 1)](*pointers, *numbers, *counters, *values)
        else:
            viewed = [t if t.dtype is dtype else t.view(dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
            run = kernel[grid] if listing is None else functools.partial(listing.note, kernel)
            found = run(*viewed, *numbers, *counters, **constants, **options)
            if found is not None and len(_compiled) < _KEPT:  # Triton's interpreter compiles nothing
                _compiled[key] = found
    recorded = recording()
    if recorded is not None:
        recorded.launch(found, grid, tensors, (*numbers, *counters, *values))


def _all_aligned(pointers: list[int]) -> bool:
    return functools.reduce(operator.or_, pointers) % _ALIGNED == 0


def _all_short(counters: tuple[float, ...]) -> bool:
    return not counters or (min(counters) >= -(1 << 31) and max(counters) < 1 << 31)


class _Here:
    """A context manager that does nothing. It takes less time than ``contextlib.nullcontext``."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


_HERE = _Here()
