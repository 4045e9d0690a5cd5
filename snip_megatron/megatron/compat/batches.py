"""Looking at the next microbatches of training without taking them."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator

from snip_megatron.errors import SnipError

if list(inspect.signature(RerunDataIterator.__init__).parameters) != ["self", "iterable"]:
    raise SnipError("Megatron's RerunDataIterator no longer wraps one iterable: probes cannot look at batches")


class PeekableIterator:
    """An iterator whose next items can be looked at: :meth:`peek` does not consume, ``next`` then gives the same."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._ahead: collections.deque[Any] = collections.deque()

    def __iter__(self) -> PeekableIterator:
        return self

    def __next__(self) -> Any:
        return self._ahead.popleft() if self._ahead else next(self._items)

    def __getattr__(self, name: str) -> Any:
        # Megatron asks an external data loader for save_state(); by then a step has consumed what was peeked at.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._items, name)

    def peek(self, count: int) -> list[Any]:
        """The next ``count`` items; fewer at the end of the data."""
        while len(self._ahead) < count:
            try:
                self._ahead.append(next(self._items))
            except StopIteration:
                break
        return list(self._ahead)[:count]


class PeekedBatches:
    """Microbatches that training has yet to take; :meth:`iterator` can be called for each pass over them."""

    def __init__(self, batches: Sequence[list[Any] | None], *, is_list: bool) -> None:
        self._batches = batches
        self._is_list = is_list

    def iterator(self, order: Sequence[int] | None = None) -> Any:
        """What a schedule takes as ``data_iterator``: an iterator, a list of them (one a model chunk), or None.

        Args:
            order: numbers of the microbatches to hand out; by default each once.

        Raises:
            SnipError: ``order`` asks for a microbatch that the data does not hold.
        """
        iterators = [None if batches is None else _copies(batches, order) for batches in self._batches]
        return iterators if self._is_list else iterators[0]


def _copies(batches: list[Any], order: Sequence[int] | None) -> Iterator[Any]:
    """Shallow copies: a forward step may replace entries of the dictionary it is handed."""
    order = range(len(batches)) if order is None else order
    if order and max(order) >= len(batches):
        raise SnipError(f"a probe needs {max(order) + 1} microbatches, and the data holds {len(batches)} more")
    return (dict(batches[i]) if isinstance(batches[i], dict) else batches[i] for i in order)


def peek(data_iterator: Any, count: int) -> PeekedBatches:
    """The next ``count`` microbatches of ``train_step``'s ``data_iterator``, which training is handed later, unchanged.

    ``data_iterator`` is a RerunDataIterator, a list of them (virtual pipeline), or None (a rank that reads no data).
    Its source is made peekable in place; the rerun machine's own record of a step is unaffected. Raises SnipError on
    other iterators.
    """
    is_list = isinstance(data_iterator, list)
    return PeekedBatches(
        [_peek_one(one, count) for one in (data_iterator if is_list else [data_iterator])], is_list=is_list
    )


def _peek_one(iterator: Any, count: int) -> list[Any] | None:
    if iterator is None:
        return None
    if not isinstance(iterator, RerunDataIterator):
        raise SnipError(f"the data iterator is a {type(iterator).__name__}, not Megatron's RerunDataIterator")
    if iterator.replaying:  # a step that the rerun machine repeats after a restart
        return list(iterator.saved_microbatches[iterator.replay_pos :][:count])
    if not isinstance(iterator.iterable, PeekableIterator):
        iterator.iterable = PeekableIterator(iterator.iterable)
    return iterator.iterable.peek(count)
