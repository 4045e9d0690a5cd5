"""Checks of values that were read from a checkpoint, which is data from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from snip_megatron.errors import SnipError, is_finite


def parse[T](kind: type[T], body: Any, where: str) -> T:
    """Return a dataclass whose fields are integers in [0, 2^31), finite numbers, texts, bools, or several numbers.

    A field that is missing, or of another type, has its default.

    Raises:
        SnipError: the body is something else, or ``__post_init__`` raised ValueError. ``where`` begins the message.
    """
    if not isinstance(body, dict):
        raise SnipError(f"{where}: must be an object")
    found = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint, value = str(field.type), body.get(field.name)  # a text: its module postpones annotations
        says, fits = _KINDS.get(hint.removesuffix(_OR_NONE), ("", None))
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if fits is None or (optional and field.name not in body):
            continue
        if not (fits(value) or (value is None and hint.endswith(_OR_NONE))):
            raise SnipError(f"{where}.{field.name}: must be {says}")
        found[field.name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**found)
    except ValueError as error:
        raise SnipError(f"{where}.{error}") from None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _are_finite(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_finite, value))


_OR_NONE = " | None"
_KINDS: dict[str, tuple[str, Callable[[Any], bool] | None]] = {
    "int": ("an integer in [0, 2^31)", _is_count),
    "float": ("a finite number", is_finite),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "tuple[float, ...]": ("a list of finite numbers", _are_finite),
}
