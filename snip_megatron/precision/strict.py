"""Strict reading of JSON. Every function raises SnipError with the path of what is wrong."""

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from snip_megatron.precision.errors import SnipError, is_finite, quoted

MOST = 2**53  # above, JSON readers of other languages lose digits


def opened_now(name: str, flags: int) -> int:
    """Open a file as the ``opener`` of :func:`open`, without waiting for the other end of a pipe."""
    number = os.open(name, flags | os.O_NONBLOCK)
    os.set_blocking(number, True)
    return number


def read_bytes(path: Path | str) -> bytes:
    """Return the content of a file. Raises OSError, also for a pipe without a writer, for which a read would wait."""
    with open(path, "rb", opener=opened_now) as file:
        content = file.read()
        if not content and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EPIPE, "a pipe into which no process writes")
    return content


def read_file(path: Path | str, where: str = "", *, most: int | None = None) -> bytes:
    """Return the content of a file, which is called ``where`` in errors. More than ``most`` bytes are refused."""
    try:
        if most is not None and os.stat(path).st_size > most:
            raise SnipError(f"{where or path}: larger than {most >> 20} MiB")
        return read_bytes(path)
    except OSError as error:
        raise SnipError(f"{where or path}: cannot be read: {error.strerror}") from None


def read_object(text: str | bytes) -> dict[str, Any]:
    """Return the object that a text holds. Other texts are refused, and an object that has a key twice."""
    start = text[:4096].lstrip()[:1]
    if text and start not in ("{", b"{"):
        raise SnipError("not a JSON object (it must start with '{')")
    try:
        body: dict[str, Any] = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text, object_pairs_hook=unique_keys
        )
    except UnicodeDecodeError as error:
        raise SnipError(f"not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise SnipError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise SnipError(f"not JSON: {error}") from None
    return body


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object as a dict. Raises SnipError if a key occurs twice."""
    body = dict(pairs)
    if len(body) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise SnipError(f"the key {quoted(twice)} stands twice in one object")
    return body


def check_schema(body: Any, *schemas: str) -> str:
    """Return the schema of an object, which is one of ``schemas``."""
    found = body.get("schema") if isinstance(body, Mapping) else None
    if not isinstance(found, str) or found not in schemas:
        known = " or ".join(f'"{schema}"' for schema in schemas)
        raise SnipError(f"schema: must be {known}")
    return found


def check_keys(body: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
    """Refuse an object that has other keys than ``known``."""
    if unknown := sorted(set(body) - set(known)):
        raise SnipError(f"{where}unknown key {quoted(unknown[0])} (known: {', '.join(known)})")


def field(body: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    """Return the value of a required key. ``prefix`` is the path of the object, with a dot."""
    if key not in body:
        raise SnipError(f"{prefix}{key}: missing")
    return body[key]


def mapping(value: Any, path: str, of: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SnipError(f"{path}: must be an object{of}")
    return value


def array(value: Any, path: str, of: str = "") -> list[Any]:
    if not isinstance(value, list):
        raise SnipError(f"{path}: must be an array{of}")
    return value


def number(value: Any, path: str) -> float:
    """Return a number as float64, NaN and Infinity too. Whole numbers beyond float64 are refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SnipError(f"{path}: must be a number, got {quoted(value)}")
    return float(value) if isinstance(value, float) else finite(value, path)


def finite(value: Any, path: str) -> float:
    if not is_finite(value):
        raise SnipError(f"{path}: must be a finite number")
    return float(value)


def whole(value: Any, path: str, least: int = 0, below: int = MOST) -> int:
    """Return an integer from ``least`` on and below ``below``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < below:
        raise SnipError(f"{path}: must be an integer, {least} or more")
    return value


def one_of(value: Any, path: str, known: Iterable[str]) -> str:
    """Return a text that is one of ``known``."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise SnipError(f"{path}: {quoted(value)} is not one of {', '.join(names)}")
    return value
