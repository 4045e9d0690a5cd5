"""Damage to data from outside."""

import copy
import itertools
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hypothesis import strategies as st

from snip_megatron.precision.errors import SnipError

LIMIT_S = 60  # only ends a test that hangs


@contextmanager
def answers() -> Iterator[None]:
    """Fails if what is inside hangs, or raises anything but a SnipError, which is one line by construction."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError("the parser hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        with suppress(SnipError):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


LONG = "a" * 5000
REPLACEMENTS = (
    None, True, -1, 2**63, -(2**64), 0.5, 1e-320, 1e308, float("nan"), float("inf"), "", "\0", "nan", "/etc/passwd",
    "\ud800", "١", [], {}, [[]], {"": {}}, [None] * 50, {"__class__": "os.system"},
)  # fmt: skip


def places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in children:
        yield from places(value, (*path, key))


def owner(body: Any, path: str) -> tuple[Any, str | int]:
    """The object that holds the field at ``path``, as ``items[1].id``, and the field."""
    *parents, key = [int(part[1:-1]) if part[0] == "[" else part for part in path.replace("[", ".[").split(".")]
    for part in parents:
        body = body[part]
    return body, key


def changed(body: Any, path: str, value: Any) -> str:
    """The text with another value of the field at ``path``, or without the field if that is ``...``."""
    body = copy.deepcopy(body)
    holder, key = owner(body, path)
    holder[key] = value
    if value is ...:
        del holder[key]
    return json.dumps(body)


def damage_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Return the bytes cut, with a flipped bit, overwritten in part, doubled, or with endless brackets."""
    how = data.draw(st.sampled_from(["cut", "flip", "noise", "twice", "deep"]))
    place = data.draw(st.integers(0, max(0, len(content) - 1)))
    if how == "cut":
        return content[:place]
    if how == "flip":
        return content[:place] + bytes([content[place] ^ (1 << data.draw(st.integers(0, 7)))]) + content[place + 1 :]
    if how == "noise":
        return content[:place] + data.draw(st.binary(max_size=40)) + content[place + 20 :]
    return content + content if how == "twice" else content[:place] + b"[" * 100_000


def hostile(body: Any) -> Iterator[Any]:
    """Yield copies of ``body`` with a number beyond float64, a long text or key, nothing or another type at a place."""
    replacements = itertools.cycle(REPLACEMENTS)
    for *parents, last in [place for place in places(body) if place]:
        for change in ("number", "text", "key", "nothing", "other"):
            copied = copy.deepcopy(body)
            owner = copied
            for key in parents:
                owner = owner[key]
            value = owner.pop(last)
            if change == "key" and isinstance(owner, dict):
                owner[LONG] = value
            elif change in ("number", "text", "other"):
                value = {"number": 10**400, "text": LONG, "other": next(replacements)}[change]
                owner.insert(last, value) if isinstance(owner, list) else owner.update({last: value})
            yield copied


def few_rows(body: Any) -> Any:
    """The same with at most two elements in each array: rows of one kind are read alike."""
    if isinstance(body, list):
        return [few_rows(value) for value in body[:2]]
    return {key: few_rows(value) for key, value in body.items()} if isinstance(body, dict) else body
