"""The line with which a function refuses its arguments."""

from collections.abc import Callable
from typing import Any

import pytest

from snip_megatron.precision.errors import SnipError


def refusal(function: Callable[..., object], *arguments: Any, code: int = 2, **options: Any) -> str:
    """Return the message of the SnipError that ``function`` raises: one line, for this exit code."""
    with pytest.raises(SnipError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == code
    return message
