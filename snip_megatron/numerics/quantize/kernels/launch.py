"""Launches compiled Triton kernels without Triton's inspection of every argument, or lists them.

Triton's inspection takes more host time than a launch. :func:`launch` remembers the compiled kernel of a call under
everything that Triton's choice depends on: the numbers, the dtype, device and alignment of tensors, the constants and
the options. Inside :func:`list_launches`, kernels are listed instead of launched, for :mod:`.compiler`.
"""

import functools
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TypedTensor = tuple[Tensor, torch.dtype]  # a tensor, and the dtype as which a kernel sees it
current = threading.local()  # its attribute ``recording`` is the :class:`.replay.Recording` of this thread in progress
_SAME_DEVICE = nullcontext()
_MOST_COMPILED = 4096
_ALIGNED = 16  # bytes; Triton compiles another kernel for pointers that are not aligned
_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    memory: Sequence[Tensor | TypedTensor],
    numbers: tuple[int, ...],
    counters: tuple[float, ...],
    constants: Mapping[str, object],
    options: Mapping[str, int],
) -> None:
    """Run ``kernel[grid](*memory, *numbers, *counters, **constants, **options)``, or list it.

    Args:
        kernel: a Triton kernel, whose parameters have this order and no defaults.
        grid: numbers of programs.
        memory: tensors, of whose first the device is. A tensor may be followed by another dtype, as which the kernel
            sees it.
        numbers: sizes and strides. A compiled kernel is remembered for each combination of them, and all are forgotten
            when they are too many, as with experts, whose rows differ from step to step.
        counters: numbers for which Triton compiles no kernel of its own (``do_not_specialize``, or real numbers). A run
            may have any number of them.
        constants: compile-time constants, in the order of the kernel's parameters.
        options: Triton's launch options. Multiplications and additions are fused by default, also by Triton 3.10.
    """
    tensors = [each if isinstance(each, Tensor) else each[0] for each in memory]
    dtypes = tuple([each.dtype if isinstance(each, Tensor) else each[1] for each in memory])
    device = tensors[0].get_device()
    with torch.cuda.device(device) if device >= 0 and device != torch.cuda.current_device() else _SAME_DEVICE:
        pointers = [t.data_ptr() for t in tensors]
        values = tuple(constants.values())
        key = (
            kernel, dtypes, numbers, values, tuple(options.values()), tuple([t.get_device() for t in tensors]),
            functools.reduce(operator.or_, pointers) % _ALIGNED == 0 or tuple([p % _ALIGNED == 0 for p in pointers]),
            tuple([-(1 << 31) <= c < 1 << 31 for c in counters]),
        )  # fmt: skip
        compiled = None if listings else _compiled.get(key)
        if compiled is not None:  # addresses instead of tensors, about each of which Triton would ask the driver
            compiled[(*grid, 1)](*pointers, *numbers, *counters, *values)
        else:
            viewed = [t if t.dtype is dtype else t.view(dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
            run = functools.partial(kernel.warmup, grid=grid) if listings else kernel[grid]
            compiled = run(*viewed, *numbers, *counters, **constants, **{"enable_fp_fusion": True, **options})
            if not listings and compiled is not None:  # the interpreter compiles nothing
                if len(_compiled) >= _MOST_COMPILED:
                    _compiled.clear()
                _compiled[key] = compiled
    active = recording()
    if active is not None:
        active.launch(compiled, grid, tensors, (*numbers, *counters, *values))


def recording() -> Any:
    """Return the :class:`.replay.Recording` of this thread in progress, or None."""
    return getattr(current, "recording", None)


# -- lists of launches -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Source:
    """The source of a kernel of DeepGEMM, and the flags of nvcc."""

    code: str
    flags: tuple[str, ...]


@dataclass
class Listing:
    """The kernels that were to be launched."""

    rows: int = 0  # number of rows of the training's matrices, if shorter matrices stand for them. Otherwise 0
    # the kernels that this process has not compiled, as keys. A string is Triton's ``specialization_data``
    kernels: dict[str | Source, None] = field(default_factory=dict)


listings: list[Listing] = []  # the listings in progress, the innermost last


@contextmanager
def list_launches(*, rows: int = 0) -> Iterator[Listing]:
    """List this package's kernels inside this context instead of launching them. Results are uninitialised memory.

    ``rows``: see :class:`Listing`.
    """
    from triton import knobs

    def note(*, compile: Mapping[str, Any], **_: object) -> bool:
        listings[-1].kernels[compile["specialization_data"]] = None
        return True  # Triton does not compile

    listings.append(Listing(rows))
    previous, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        yield listings[-1]
    finally:
        listings.pop()
        knobs.runtime.jit_cache_hook = previous


def share_cache() -> None:
    """Let all ranks of this host use one folder for Triton's cache on disk, which torch's compiler would move."""
    with suppress(ImportError):
        import triton

        os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
