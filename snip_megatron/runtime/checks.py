"""Checks of values that were read from a checkpoint, which is data from outside."""

from __future__ import annotations

from typing import Any

from snip_megatron.errors import SnipError, is_finite


def count(value: Any, where: str) -> int:
    """Return ``value`` if it is an integer in [0, 2^31). Raises SnipError naming ``where`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise SnipError(f"{where}: must be an integer in [0, 2^31)")
    return value


def squares(value: Any, where: str) -> list[float]:
    """Return ``value`` if it is a list of finite numbers of 0 or more. Raises SnipError naming ``where`` otherwise."""
    if not isinstance(value, list):
        raise SnipError(f"{where}: must be a list")
    if not all(is_finite(number) and number >= 0 for number in value):
        raise SnipError(f"{where}: must hold finite numbers of 0 or more")
    return [float(number) for number in value]
