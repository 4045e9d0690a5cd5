"""Strict reading of JSON objects into dataclasses. Values of a wrong type and unknown names are refused.

Each field of such a dataclass is an :func:`entry` with a reader: a function of a value and its place for messages, such
as ``experiment.json: from_warm: seeds``, that returns the value or raises SnipError.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

from snip_megatron.errors import SnipError, cut, is_finite, quoted
from snip_megatron.precision import strict

Reader = Callable[[Any, str], Any]


def entry(read: Reader, default: Any = dataclasses.MISSING, *, name: str | None = None) -> Any:
    """Return a dataclass field that :func:`parse` reads. ``name`` is its name in the file if it is another one."""
    return dataclasses.field(default=default, metadata={"read": read, "name": name})


def parse[T](kind: type[T], body: Any, where: str, /, **others: Any) -> T:
    """Read a dataclass from an object. A null counts as absent.

    ``where`` is the place of the object for messages, and ``others`` are values of fields that it does not have.
    """
    strict.mapping(body, where)
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
    return lambda value, where: strict.whole(value, where, least, 2**63)


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
    """Read a printable text of at most 200 bytes."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.encode()) <= 200:
        raise SnipError(f"{where}: expected a text of at most 200 printable characters, not {quoted(value)}")
    return value


def text_without(character: str) -> Reader:
    """Read such a text that does not have ``character``."""

    def read(value: Any, where: str) -> str:
        if character in text(value, where):
            raise SnipError(f"{where}: {quoted(value)} must not have a {character}")
        return str(value)

    return read


def one_of(known: Collection[str]) -> Reader:
    """Read one of the ``known`` texts."""
    return lambda value, where: strict.one_of(value, where, known, "is unknown; choose one of")


def several(read: Reader, *, distinct: bool = False, indexed: bool = False) -> Reader:
    """Read a list as a tuple. ``indexed`` messages name the position of the entry."""

    def read_all(value: Any, where: str) -> tuple[Any, ...]:
        given = strict.array(value, where)
        found = tuple(read(each, f"{where}[{i}]" if indexed else where) for i, each in enumerate(given))
        if distinct and len(set(found)) < len(found):
            raise SnipError(f"{where}: {quoted(list(found))}: one of them stands there twice")
        return found

    return read_all
