"""Damage to data from outside."""

import copy
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


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", "\0", "fp4", "nan", "/etc/passwd", "../../../x", "file:///x", "a" * 5000, "\ud800", "١"]),
    st.sampled_from([[], {}, [[]], {"": {}}, [None] * 50, {"__class__": "os.system"}]),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
)


def places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in children:
        yield from places(value, (*path, key))


def damage_json(data: st.DataObject, body: Any) -> Any:
    """Up to three places of a JSON value replaced, removed or duplicated."""
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from([p for p in places(body) if p] or [(None,)]))
        if last is None:
            return data.draw(JUNK.map(copy.deepcopy))
        owner = body
        for key in parents:
            owner = owner[key]
        how = data.draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if how == "remove":
            del owner[last]
        elif how == "replace":
            owner[last] = data.draw(JUNK.map(copy.deepcopy))
        elif isinstance(owner, list):
            owner.append(copy.deepcopy(owner[last]))
        else:
            owner[data.draw(st.sampled_from(["x", "", "schema", "/etc/passwd"]))] = data.draw(JUNK.map(copy.deepcopy))
    return body


def damage_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Cut, flipped, overwritten or doubled."""
    how = data.draw(st.sampled_from(["cut", "flip", "noise", "twice", "deep"]))
    place = data.draw(st.integers(0, max(0, len(content) - 1)))
    if how == "cut":
        return content[:place]
    if how == "flip":
        return content[:place] + bytes([content[place] ^ (1 << data.draw(st.integers(0, 7)))]) + content[place + 1 :]
    if how == "noise":
        return content[:place] + data.draw(st.binary(max_size=40)) + content[place + 20 :]
    return content + content if how == "twice" else content[:place] + b"[" * 100_000


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """By its structure where it is JSON, else by its bytes."""
    if data.draw(st.booleans()):
        try:
            body = json.loads(content)
        except ValueError:
            return damage_bytes(data, content)
        return json.dumps(damage_json(data, body)).encode("utf-8", "surrogatepass")
    return damage_bytes(data, content)


LONG = "a" * 5000


def hostile(body: Any) -> Iterator[Any]:
    """Copies of ``body`` with one value beyond float64, one long text, one long key, at every place in turn."""
    for *parents, last in [place for place in places(body) if place]:
        for change in ("number", "text", "key"):
            copied = copy.deepcopy(body)
            owner = copied
            for key in parents:
                owner = owner[key]
            if change != "key":
                owner[last] = 10**400 if change == "number" else LONG
            elif isinstance(owner, dict):
                owner[LONG] = owner.pop(last)
            yield copied


def few_rows(body: Any) -> Any:
    """The same with at most two elements in each array: rows of one kind are read alike."""
    if isinstance(body, list):
        return [few_rows(value) for value in body[:2]]
    return {key: few_rows(value) for key, value in body.items()} if isinstance(body, dict) else body
