"""Argument types of commands."""

import argparse
import math
from collections.abc import Callable

from snip_megatron.precision.errors import quoted


def positive(description: str, below: float = math.inf, above: float = 0.0) -> Callable[[str], float]:
    """Return an argparse type for numbers between ``above`` and ``below``. ``description`` is used in its errors."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value < below:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not {description}")
        return value

    return parse
