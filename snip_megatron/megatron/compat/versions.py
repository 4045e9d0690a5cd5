"""The version of Megatron, and checks of its private names and signatures."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from megatron.core import __version__ as _version

from snip_megatron.megatron.startup import SUPPORTED, check_version
from snip_megatron.precision.errors import SnipError


def check_signature(function: Callable[..., Any], *expected: str) -> None:
    """Raise SnipError unless the leading parameters of ``function`` are named ``expected``, in that order."""
    actual = list(inspect.signature(function).parameters)
    if actual[: len(expected)] != list(expected):
        _refuse(function, f"takes ({', '.join(actual)}), expected ({', '.join(expected)}, ...)")


def check_names(owner: Any, *expected: str) -> None:
    """Raise SnipError unless a module or class has attributes of these names, or the code of a function uses them."""
    missing = [
        name
        for name in expected
        if not (name in owner.__code__.co_names if inspect.isfunction(owner) else hasattr(owner, name))
    ]
    if missing:
        _refuse(owner, f"has no {', '.join(missing)}")


def _refuse(owner: Any, why: str) -> NoReturn:
    where = f"{owner.__module__}.{owner.__qualname__}" if hasattr(owner, "__qualname__") else owner.__name__
    raise SnipError(f"{where} {why}; this Megatron is patched or not supported (megatron-core {_version}, {SUPPORTED})")


@contextlib.contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of ``owner`` these values inside this context."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing. It replaces a function that must not run."""


MEGATRON_VERSION = check_version(_version)
