"""Strict reading of an experiment file. Values of a wrong type and unknown names are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from snip_megatron.errors import SnipError, cut, is_finite, quoted

_MISSING: Any = object()


class Fields:
    """The fields of a JSON or TOML object. All readers raise SnipError naming the field and the fault.

    Args:
        body: the object.
        where: its path for messages, such as ``experiment.json: from_warm``.
    """

    def __init__(self, body: Any, where: str) -> None:
        if not isinstance(body, Mapping):
            raise SnipError(f"{where}: expected an object")
        self._body = dict(body)
        self._where = where
        self._known: set[str] = set()

    def at(self, name: str) -> str:
        """Return the path of the field ``name`` for messages."""
        return f"{self._where}: {cut(name)}"

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        self._known.add(name)
        return self._body.get(name) is not None

    def raw(self, name: str) -> Any:
        """Return the value without a check, or None if it is absent."""
        self._known.add(name)
        return self._body.get(name)

    def integer(self, name: str, default: Any = _MISSING, *, least: int = 0) -> int:
        """Return a whole number of at least ``least`` that fits int64."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise SnipError(
                f"{self.at(name)}: expected a whole number of at least {least} and below 2^63, not {quoted(value)}"
            )
        return value

    def number(self, name: str, default: Any = _MISSING, *, least: float = 0.0, most: float = math.inf) -> float:
        """Return a finite number in [least, most]."""
        return _number(self._value(name, default), self.at(name), least, most)

    def numbers(
        self, name: str, default: Any = _MISSING, *, least: float = 0.0, most: float = 1.0
    ) -> tuple[float, ...]:
        """Return a list of finite numbers in [least, most]."""
        return tuple(_number(value, self.at(name), least, most) for value in self._list(name, default))

    def integers(self, name: str, default: Any = _MISSING) -> tuple[int, ...]:
        """Return a list of distinct whole numbers of 0 or more."""
        values = self._list(name, default)
        whole = all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in values)
        if not whole or len(set(values)) < len(values):
            raise SnipError(f"{self.at(name)}: expected a list of distinct whole numbers, not {quoted(list(values))}")
        return tuple(values)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise SnipError(f"{self.at(name)}: expected true or false, not {quoted(value)}")
        return value

    def text(self, name: str, default: Any = _MISSING) -> str:
        """Return a non-empty string."""
        value = self._value(name, default)
        if not isinstance(value, str) or not value:
            raise SnipError(f"{self.at(name)}: expected a text, not {quoted(value)}")
        return value

    def texts(self, name: str, default: Any = _MISSING) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._list(name, default)
        if not all(isinstance(value, str) for value in values):
            raise SnipError(f"{self.at(name)}: expected a list of texts, not {quoted(list(values))}")
        return tuple(values)

    def close(self) -> None:
        """Raise SnipError if the object has a field that was not read."""
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
            raise SnipError(f"{self.at(name)}: expected a list, not {quoted(value)}")
        return list(value)


def _number(value: Any, where: str, least: float, most: float) -> float:
    if not is_finite(value) or not least <= value <= most:
        limits = f"of at least {least:g}" if math.isinf(most) else f"between {least:g} and {most:g}"
        raise SnipError(f"{where}: expected a number {limits}, not {quoted(value)}")
    return float(value)
