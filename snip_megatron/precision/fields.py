"""Dataclasses as JSON objects of their fields, read back by the types of the fields."""

import base64
import dataclasses
from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError, cut, quoted
from snip_megatron.precision.strict import MOST, array, check_keys, finite, mapping, one_of


class JsonFields:
    """A dataclass of numbers, texts, tuples, mappings, budgets, and objects with ``as_dict`` or ``to_bytes``."""

    __slots__ = ()
    _kinds: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._kinds = get_type_hints(cls)  # once: it evaluates annotations, and a parser of data evaluates nothing

    def as_dict(self) -> dict[str, Any]:
        return {f.name: _encoded(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, body: Any, where: str) -> Self:
        """Read :meth:`as_dict`. Fields that are missing have their defaults.

        Raises SnipError naming ``where`` and the field that is missing, unknown or invalid.
        """
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        check_keys(mapping(body, where), [f.name for f in fields], f"{where}: ")
        for f in fields:
            if f.name not in body and f.default is f.default_factory is dataclasses.MISSING:
                raise SnipError(f"{where}.{f.name}: missing")
        found = {name: _decoded(cls._kinds[name], value, f"{where}.{name}") for name, value in body.items()}
        try:
            return cls(**found)
        except ValueError as error:
            raise SnipError(f"{where}.{cut(error)}") from None


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (str, Budget)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(_encoded(key)): _encoded(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encoded(item) for item in value]
    return value.as_dict() if hasattr(value, "as_dict") else base64.b64encode(value.to_bytes()).decode()


def _decoded(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:
        return None if value is None else _decoded(inner[0], value, where)
    if origin is tuple:
        kinds = inner[:1] * len(array(value, where)) if inner[-1] is ... else inner
        if len(value) != len(kinds):
            raise SnipError(f"{where}: must be {len(kinds)} values")
        return tuple(_decoded(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        items = mapping(value, where).items()
        return {_key(inner[0], key, where): _decoded(inner[1], item, f"{where}[{quoted(key)}]") for key, item in items}
    if kind is Budget:
        return Budget.parse(value, f"{where}:")
    if issubclass(kind, Enum):
        return kind(one_of(value, where, [str(member.value) for member in kind]))
    if kind is float:
        return finite(value, where)
    if kind in _SAYS:
        if type(value) is not kind or (kind is int and abs(value) >= MOST):
            raise SnipError(f"{where}: must be {_SAYS[kind]}")
        return value
    return _object(kind, value, where)


def _key(kind: type, key: str, where: str) -> Any:
    try:
        return kind(key)
    except ValueError:
        raise SnipError(f"{where}: unknown key {quoted(key)}") from None


def _object(kind: Any, value: Any, where: str) -> Any:
    if issubclass(kind, JsonFields):
        return kind.from_dict(value, where)
    try:
        if hasattr(kind, "from_dict"):
            return kind.from_dict(value)
        content = base64.b64decode(value, validate=True)
    except (TypeError, ValueError, SnipError) as error:
        raise SnipError(f"{where}: {error}") from None
    return kind.from_bytes(content, where=where)


_SAYS = {bool: "true or false", int: "an integer", str: "a text"}
