"""Strict reading of JSON, and dataclasses that are stored as JSON objects of their fields.

Every function raises SnipError in one short line: the file, the JSON path, and what is wrong. msgspec 0.22 does not
replace this file: it accepts a key that stands twice in an object, leaves keys of mappings out of its paths
(``$.choices[...]``), and repeats texts of any length.
"""

import base64
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, TypeGuard, get_args, get_origin, get_type_hints

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError, cut, quoted

INTEGER_LIMIT = 2**53
"""JSON readers of other languages lose digits of integers from here on."""


# -- texts and files -------------------------------------------------------------------------------------------
def read_file(path: Path | str, where: str = "") -> bytes:
    """Return the content of a file. Errors name it by ``where``, or by its path."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SnipError(f"{where or path}: cannot be read: {error.strerror}") from None


def read_object(text: str | bytes) -> dict[str, Any]:
    """Parse a text that holds one JSON object. Objects in which a key stands twice are refused."""
    if text and text[:4096].lstrip()[:1] not in ("{", b"{"):
        raise SnipError("not a JSON object (it must start with '{')")
    try:
        body: dict[str, Any] = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text, object_pairs_hook=_unique_keys
        )
    except UnicodeDecodeError as error:
        raise SnipError(f"not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise SnipError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise SnipError(f"not JSON: {error}") from None
    return body


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise SnipError(f"the key {quoted(repeated)} stands twice in one object")
    return body


# -- objects ---------------------------------------------------------------------------------------------------
def check_schema(body: Any, *schemas: str) -> str:
    """Return the schema of an object, which must be one of ``schemas``."""
    schema = body.get("schema") if isinstance(body, Mapping) else None
    if not isinstance(schema, str) or schema not in schemas:
        accepted = " or ".join(f'"{schema}"' for schema in schemas)
        raise SnipError(f"schema: must be {accepted}")
    return schema


def check_keys(body: Mapping[str, Any], keys: Iterable[str], where: str = "") -> None:
    """Refuse an object that has other keys than ``keys``."""
    if unknown := sorted(set(body) - set(keys)):
        raise SnipError(f"{where}unknown key {quoted(unknown[0])} (known: {', '.join(keys)})")


def field(body: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    """Return the value of a required key. ``prefix`` is the path of the object, with a dot."""
    if key not in body:
        raise SnipError(f"{prefix}{key}: missing")
    return body[key]


# -- values ----------------------------------------------------------------------------------------------------
def mapping(value: Any, path: str, of: str = "") -> dict[str, Any]:
    """Return a value that must be an object. ``of`` says in the error line what it must hold."""
    if not isinstance(value, dict):
        raise SnipError(f"{path}: must be an object{of}")
    return value


def array(value: Any, path: str, of: str = "") -> list[Any]:
    """Return a value that must be an array. ``of`` says in the error line what it must hold."""
    if not isinstance(value, list):
        raise SnipError(f"{path}: must be an array{of}")
    return value


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number within float64. JSON has integers of any length."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def finite(value: Any, path: str) -> float:
    """Return a finite number as float64."""
    if not is_finite(value):
        raise SnipError(f"{path}: must be a finite number")
    return float(value)


def whole(value: Any, path: str, least: int = 0, below: int = INTEGER_LIMIT) -> int:
    """Return an integer of at least ``least`` and below ``below``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < below:
        raise SnipError(f"{path}: must be an integer, {least} or more")
    return value


def one_of(value: Any, path: str, accepted: Iterable[str]) -> str:
    """Return a text that must be one of ``accepted``."""
    names = list(accepted)
    if not isinstance(value, str) or value not in names:
        raise SnipError(f"{path}: {quoted(value)} is not one of {', '.join(names)}")
    return value


# -- dataclasses -----------------------------------------------------------------------------------------------
class JsonFields:
    """Base of a dataclass that is stored as a JSON object of its fields, which are read by their types.

    A field is a number, text, bool, Enum, Budget, tuple, mapping, another JsonFields, or an object with ``as_dict`` and
    ``from_dict`` or with ``to_bytes`` and ``from_bytes`` (stored in base64).
    """

    __slots__ = ()
    _field_types: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._field_types = get_type_hints(cls)  # here and not in a parser of data, which must evaluate no annotation

    def as_dict(self) -> dict[str, Any]:
        """Return the object of the fields."""
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
        values = {name: _decoded(cls._field_types[name], value, f"{where}.{name}") for name, value in body.items()}
        try:
            return cls(**values)
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


_SCALARS = {bool: "true or false", int: "an integer", str: "a text"}


def _decoded(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:
        return None if value is None else _decoded(arguments[0], value, where)
    if origin is tuple:
        kinds = arguments[:1] * len(array(value, where)) if arguments[-1] is ... else arguments
        if len(array(value, where)) != len(kinds):
            raise SnipError(f"{where}: must be {len(kinds)} values")
        return tuple(_decoded(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        return {
            _decoded_key(arguments[0], key, where): _decoded(arguments[1], item, f"{where}[{quoted(key)}]")
            for key, item in mapping(value, where).items()
        }
    if kind is Budget:
        return Budget.parse(value, f"{where}:")
    if issubclass(kind, Enum):
        return kind(one_of(value, where, [str(member.value) for member in kind]))
    if kind is float:
        return finite(value, where)
    if kind in _SCALARS:
        if type(value) is not kind or (kind is int and abs(value) >= INTEGER_LIMIT):
            raise SnipError(f"{where}: must be {_SCALARS[kind]}")
        return value
    return _decoded_object(kind, value, where)


def _decoded_key(kind: type, key: str, where: str) -> Any:
    try:
        return kind(key)
    except ValueError:
        raise SnipError(f"{where}: unknown key {quoted(key)}") from None


def _decoded_object(kind: Any, value: Any, where: str) -> Any:
    if issubclass(kind, JsonFields):
        return kind.from_dict(value, where)
    try:
        if hasattr(kind, "from_dict"):
            return kind.from_dict(value)
        content = base64.b64decode(value, validate=True)
    except (TypeError, ValueError, SnipError) as error:
        raise SnipError(f"{where}: {error}") from None
    return kind.from_bytes(content, where=where)
