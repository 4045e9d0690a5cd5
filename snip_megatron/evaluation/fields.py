"""Strict reading of JSON or TOML objects into dataclasses. Values of a wrong type and unknown names are refused.

Each field of such a dataclass is an :func:`entry` with a reader: a function of a value and its place for messages, such
as ``experiment.json: from_warm: seeds``, that returns the value or raises SnipError.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from snip_megatron.errors import SnipError, cut, is_finite, quoted

Reader = Callable[[Any, str], Any]


def entry(read: Reader, default: Any = dataclasses.MISSING, *, name: str | None = None) -> Any:
    """Return a dataclass field that :func:`parse` reads. ``name`` is its name in the file if it is another one."""
    return dataclasses.field(default=default, metadata={"read": read, "name": name})


def parse[T](kind: type[T], body: Any, where: str, /, **others: Any) -> T:
    """Read a dataclass from an object. A null counts as absent.

    Args:
        kind: the dataclass.
        body: the object.
        where: its place for messages.
        others: values of fields that are not read from ``body``.
    """
    if not isinstance(body, Mapping):
        raise SnipError(f"{where}: expected an object")
    fields = {f.metadata["name"] or f.name: f for f in dataclasses.fields(kind) if "read" in f.metadata}  # type: ignore[arg-type]
    if unknown := sorted(set(body) - set(fields)):
        raise SnipError(f"{where}: {cut(unknown[0])}: unknown; known here are {', '.join(sorted(fields))}")
    values = dict(others)
    for name, field in fields.items():
        if body.get(name) is not None:
            values[field.name] = field.metadata["read"](body[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING:
            raise SnipError(f"{where}: {name}: is missing")
    return kind(**values)


def made_of(kind: type[Any]) -> Reader:
    """Return the reader of a dataclass."""
    return lambda body, where: parse(kind, body, where)


# -- readers -------------------------------------------------------------------------------------------------------
def whole(least: int = 0) -> Reader:
    """Read a whole number of at least ``least`` that fits int64."""

    def read(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise SnipError(f"{where}: expected a whole number of at least {least} and below 2^63, not {quoted(value)}")
        return value

    return read


def number(least: float = 0.0, most: float = math.inf) -> Reader:
    """Read a finite number in [least, most]."""

    def read(value: Any, where: str) -> float:
        if not is_finite(value) or not least <= value <= most:
            limits = f"of at least {least:g}" if math.isinf(most) else f"between {least:g} and {most:g}"
            raise SnipError(f"{where}: expected a number {limits}, not {quoted(value)}")
        return float(value)

    return read


def flag(value: Any, where: str) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise SnipError(f"{where}: expected true or false, not {quoted(value)}")
    return value


def text(value: Any, where: str) -> str:
    """Read a non-empty string."""
    if not isinstance(value, str) or not value:
        raise SnipError(f"{where}: expected a text, not {quoted(value)}")
    return value


def printable(without: str, fault: str, longest: int = 200) -> Reader:
    """Read a printable text of at most ``longest`` bytes that lacks the character ``without``, for which it has a
    ``fault``.
    """

    def read(value: Any, where: str) -> str:
        found = text(value, where)
        if not found.isprintable() or without in found or len(found.encode()) > longest:
            raise SnipError(
                f"{where}: {quoted(found)} {fault}: give at most {longest} printable characters, none of them {without}"
            )
        return found

    return read


def one_of(known: Collection[str]) -> Reader:
    """Read one of the ``known`` texts."""

    def read(value: Any, where: str) -> str:
        if text(value, where) not in known:
            raise SnipError(f"{where}: {quoted(value)} is unknown; choose one of {', '.join(known)}")
        return str(value)

    return read


def several(read: Reader, what: str, *, distinct: bool = False, indexed: bool = False) -> Reader:
    """Read a list of ``what`` as a tuple. ``indexed`` messages name the position of the entry."""

    def read_all(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise SnipError(f"{where}: expected a list of {what}, not {quoted(value)}")
        found = tuple(read(each, f"{where}[{i}]" if indexed else where) for i, each in enumerate(value))
        if distinct and len(set(found)) < len(found):
            raise SnipError(f"{where}: expected a list of distinct {what}, not {quoted(list(found))}")
        return found

    return read_all
