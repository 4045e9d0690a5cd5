"""Checks the version of Megatron and the signatures of the private functions that SNIP relies on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core import __version__ as _version

from snip_megatron.errors import SnipError, quoted
from snip_megatron.megatron.supported import BEYOND, OLDEST

SUPPORTED = f">={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"


def parse_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as ``0.19.0rc1+abc``. Raises SnipError if it cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise SnipError(f"megatron-core has version {quoted(text)}, which cannot be read; supported: {SUPPORTED}")
    return int(match[1]), int(match[2])


def check_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version. Raises SnipError if it is not supported."""
    version = parse_version(text)
    if not OLDEST <= version < BEYOND:
        raise SnipError(f"megatron-core {text} is installed; snip_megatron supports {SUPPORTED}")
    return version


def check_signature(function: Callable[..., Any], expected: Iterable[str], where: str) -> None:
    """Raise SnipError unless the leading parameters of ``function`` are named ``expected``, in that order."""
    expected = list(expected)
    found = list(inspect.signature(function).parameters)
    if found[: len(expected)] != expected:
        raise SnipError(
            f"{where} of megatron-core {_version} takes ({', '.join(found)}), expected ({', '.join(expected)}, ...);"
            f" this Megatron is patched or not supported ({SUPPORTED})"
        )


MEGATRON_VERSION = check_version(_version)
