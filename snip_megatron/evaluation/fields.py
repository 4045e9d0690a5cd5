"""Strict reading of an experiment file: each value has a type and a place, unknown names are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from snip_megatron.errors import SnipError

_MISSING: Any = object()


class Fields:
    """The fields of one JSON or TOML object.

    Args:
        body: the object. where: its path for messages, ``experiment.json: from_warm``. Raises SnipError if no object.
    """

    def __init__(self, body: Any, where: str) -> None:
        if not isinstance(body, Mapping):
            raise SnipError(f"{where}: expected an object")
        self._body = dict(body)
        self._where = where
        self._known: set[str] = set()

    def at(self, name: str) -> str:
        """Path of the field ``name``."""
        return f"{self._where}: {name}"

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        self._known.add(name)
        return self._body.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as read; None where it is absent."""
        self._known.add(name)
        return self._body.get(name)

    def integer(self, name: str, default: Any = _MISSING, *, least: int = 0) -> int:
        """A whole number of at least ``least``."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SnipError(f"{self.at(name)}: expected a whole number of at least {least}, not {value!r}")
        return value

    def number(self, name: str, default: Any = _MISSING, *, least: float = 0.0, most: float = math.inf) -> float:
        """A finite number in [least, most]."""
        return _number(self._value(name, default), self.at(name), least, most)

    def numbers(
        self, name: str, default: Any = _MISSING, *, least: float = 0.0, most: float = 1.0
    ) -> tuple[float, ...]:
        """A list of finite numbers in [least, most]."""
        return tuple(_number(value, self.at(name), least, most) for value in self._list(name, default))

    def integers(self, name: str, default: Any = _MISSING) -> tuple[int, ...]:
        """A list of distinct whole numbers, none negative."""
        values = self._list(name, default)
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values) or len(set(values)) < len(
            values
        ):
            raise SnipError(f"{self.at(name)}: expected a list of distinct whole numbers, not {list(values)!r}")
        return tuple(values)

    def text(self, name: str, default: Any = _MISSING) -> str:
        """A string that is not empty."""
        value = self._value(name, default)
        if not isinstance(value, str) or not value:
            raise SnipError(f"{self.at(name)}: expected a text, not {value!r}")
        return value

    def texts(self, name: str, default: Any = _MISSING) -> tuple[str, ...]:
        """A list of strings."""
        values = self._list(name, default)
        if not all(isinstance(value, str) for value in values):
            raise SnipError(f"{self.at(name)}: expected a list of texts, not {list(values)!r}")
        return tuple(values)

    def close(self) -> None:
        """Raises SnipError on a field that nobody asked for."""
        unknown = sorted(set(self._body) - self._known)
        if unknown:
            raise SnipError(f"{self.at(unknown[0])}: unknown; known here are {', '.join(sorted(self._known))}")

    def _value(self, name: str, default: Any) -> Any:
        self._known.add(name)
        value = self._body.get(name, default)
        if value is _MISSING:
            raise SnipError(f"{self.at(name)}: is missing")
        return value

    def _list(self, name: str, default: Any) -> list[Any]:
        value = self._value(name, default)
        if not isinstance(value, (list, tuple)):
            raise SnipError(f"{self.at(name)}: expected a list, not {value!r}")
        return list(value)


def _number(value: Any, where: str, least: float, most: float) -> float:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or not least <= value <= most:
        limits = f"of at least {least:g}" if math.isinf(most) else f"between {least:g} and {most:g}"
        raise SnipError(f"{where}: expected a number {limits}, not {value!r}")
    return float(value)
