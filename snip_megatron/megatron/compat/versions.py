"""The version of Megatron, and checks of the signatures of the private functions that SNIP relies on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core import __version__ as _version

from snip_megatron.errors import SnipError
from snip_megatron.megatron.supported import SUPPORTED, check_version


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
