"""Launches compiled Triton kernels without Triton's inspection of every argument, or lists them.

Triton inspects every argument of every launch to find the compiled kernel, which takes more host time than the launch
itself. :func:`launch` remembers the compiled kernel of a call under everything that Triton's choice depends on: the
numbers, the dtype, device and alignment of tensors, the constants and the options.

Inside :func:`listed`, kernels are listed instead of launched, so that :mod:`.compiler` can compile them before code
needs them. A :class:`Variant` holds what a kernel is compiled for, so that another process can compile it without the
tensors.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Seen = tuple[Tensor, torch.dtype]
"""A tensor, and the dtype as which a kernel sees it."""
current = threading.local()
"""Its attribute ``recording`` is the :class:`.replay.Recording` of this thread in progress."""
_KEPT = 4096
_ALIGNED = 16
"""Alignment in bytes, and divisor of integers, for which Triton compiles kernels of their own."""
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


def recording() -> Any:
    """Return the :class:`.replay.Recording` of this thread in progress, or None."""
    return getattr(current, "recording", None)


# -- listings --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pointer:
    """A tensor argument of a kernel.

    Attributes:
        aligned: whether the address of its first element is a multiple of 16 bytes.
    """

    dtype: torch.dtype
    aligned: bool


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel.

    Attributes:
        module, name: module and name of the kernel's definition.
        arguments: for each parameter, a :class:`Pointer`, a constant, or a number that represents all numbers that
            Triton treats alike.
    """

    module: str
    name: str
    arguments: tuple[object, ...]
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kernel: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Variant:
        """Return the variant that ``kernel[grid](*arguments, **named)`` runs."""
        parameters = inspect.signature(kernel.fn).parameters
        given = dict(zip(parameters, arguments, strict=False)) | {k: v for k, v in named.items() if k in parameters}
        names = "do_not_specialize"  # the interpreter holds it among the arguments of its decorator
        plain = set(getattr(kernel, names, None) or getattr(kernel, "kwargs", {}).get(names) or ())
        described = tuple(
            value if "constexpr" in str(parameter.annotation) else _described(value, specialised=name not in plain)
            for name, parameter in parameters.items()
            for value in (given[name],)
        )
        options = tuple(sorted((k, v) for k, v in named.items() if k not in parameters))
        return cls(kernel.fn.__module__, kernel.fn.__name__, described, options)


def _described(value: Any, *, specialised: bool) -> object:
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.data_ptr() % _ALIGNED == 0)
    if isinstance(value, float):
        return 0.5
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if -(1 << 31) <= value < 1 << 31:
        base = 0
    else:
        base = 1 << 40 if value < 1 << 63 else 1 << 63
    if not specialised:
        return base + 3
    return value if value == 1 else base + (_ALIGNED if value % _ALIGNED == 0 else 3)


@dataclass(frozen=True)
class Source:
    """The source of a kernel of DeepGEMM, and the flags of nvcc."""

    code: str
    flags: tuple[str, ...]


@dataclass
class Listing:
    """The kernels that were to be launched.

    Attributes:
        rows: rows of the training's matrices, for which shorter ones stand; 0: the matrices are the training's.
        variants: those of Triton, and the sources of DeepGEMM's that are not compiled, in the order of their first
            launch, as keys.
    """

    rows: int = 0
    variants: dict[Variant | Source, None] = field(default_factory=dict)

    def note(self, kernel: Any, /, *arguments: Any, **named: Any) -> None:
        """Add the variant that ``kernel[grid](*arguments, **named)`` runs."""
        self.variants[Variant.of(kernel, arguments, named)] = None


def share_cache() -> None:
    """Keep Triton's cache on disk where it is, for all ranks of this host: they compile for each other.

    torch's compiler gives the cache of each device a folder of its own when it first compiles, unless this was called.
    Nothing is done where Triton is not installed.
    """
    with suppress(ImportError):
        import triton

        os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


_active: list[Listing] = []


def active() -> Listing | None:
    """Return the innermost listing in progress, or None."""
    return _active[-1] if _active else None


@contextmanager
def listed(*, rows: int = 0) -> Iterator[Listing]:
    """List all launches of this package's kernels inside this context, of matrices that stand for ``rows`` rows.

    The kernels do not run, so that their results are uninitialised memory.
    """
    listing = Listing(rows)
    _active.append(listing)
    try:
        yield listing
    finally:
        _active.pop()
