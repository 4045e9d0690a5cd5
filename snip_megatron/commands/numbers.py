"""Argument types of commands."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from snip_megatron.errors import quoted


def positive(description: str, below: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for numbers above 0 and below ``below``. ``description`` is used in its errors."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < below:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not {description}")
        return value

    return parse
