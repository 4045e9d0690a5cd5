"""Versions and signatures that we rely on are checked, with a clear error."""

from typing import Any

import pytest

from snip_megatron.megatron.compat.versions import check_names, check_signature
from snip_megatron.megatron.startup import SUPPORTED, check_version
from snip_megatron.precision.errors import SnipError


@pytest.mark.parametrize(
    ("text", "version"), [("0.19.2", (0, 19)), ("0.19.3rc3+ab12", (0, 19)), ("0.20.0rc0", (0, 20)), ("1.0", (1, 0))]
)
def test_supported(text: str, version: tuple[int, int]) -> None:
    assert check_version(text) == version


@pytest.mark.parametrize("text", ["0.18.2", "0.19.1", "0.19", "core"])
def test_unsupported(text: str) -> None:
    with pytest.raises(SnipError, match=SUPPORTED):
        check_version(text)


def test_signature() -> None:
    def function(a: Any, b: Any, c: Any = None) -> None: ...

    check_signature(function, "a", "b")
    for expected in (("b", "a"), ("a", "b", "c", "d")):
        with pytest.raises(SnipError, match=r"function takes \(a, b, c\), expected"):
            check_signature(function, *expected)


def test_names() -> None:
    def function() -> None:
        check_version("0.19.2")

    check_names(function, "check_version")
    check_names(pytest, "raises")
    for owner in (function, pytest):
        with pytest.raises(SnipError, match=r"(function|pytest) has no tomorrow, yesterday"):
            check_names(owner, "tomorrow", "yesterday")
