"""Lists the variants of Triton kernels that a piece of code launches, so that they can be compiled before it runs.

Triton compiles a kernel for the types of its arguments, for some properties of their values, and for its constants. A
:class:`Variant` holds these, so that another process can compile the kernel without the tensors.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from snip_megatron.numerics.quantize.kernels.nvcc import Source

_ALIGNED = 16
"""Alignment in bytes, and divisor of integers, for which Triton compiles kernels of their own."""


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
        plain = set(getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get(_PLAIN) or ())
        described = tuple(
            value if "constexpr" in str(parameter.annotation) else _described(value, specialised=name not in plain)
            for name, parameter in parameters.items()
            for value in (given[name],)
        )
        options = tuple(sorted((k, v) for k, v in named.items() if k not in parameters))
        return cls(kernel.fn.__module__, kernel.fn.__name__, described, options)


_PLAIN = "do_not_specialize"


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
