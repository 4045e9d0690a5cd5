"""Reads the next microbatches of training, or some of their sequences, without consuming them."""

from __future__ import annotations

import argparse
import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import global_vars

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat.versions import check_signature

check_signature(RerunDataIterator.__init__, "self", "iterable")

_RAMPS = ("--step-batch-size-schedule", "--rampup-batch-size")


def batch_size_ramp(args: argparse.Namespace) -> str | None:
    """Return the argument by which the batch size grows in training; None without."""
    return next((name for name in _RAMPS if getattr(args, name[2:].replace("-", "_"), None) is not None), None)


class PeekableIterator:
    """An iterator with :meth:`peek`, which returns the next items without consuming them."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._ahead: collections.deque[Any] = collections.deque()

    def __iter__(self) -> PeekableIterator:
        return self

    def __next__(self) -> Any:
        return self._ahead.popleft() if self._ahead else next(self._items)

    def __getattr__(self, name: str) -> Any:
        # Megatron calls save_state() of an external data loader. By then the step has consumed all peeked items.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._items, name)

    def peek(self, count: int) -> list[Any]:
        """Return the next ``count`` items, or fewer at the end of the data."""
        while len(self._ahead) < count:
            try:
                self._ahead.append(next(self._items))
            except StopIteration:
                break
        return list(self._ahead)[:count]


class PeekedBatches:
    """Peeked microbatches. :meth:`iterator` gives a new iterator over them for each pass."""

    def __init__(self, batches: Sequence[list[Any] | None], *, is_list: bool) -> None:
        self._batches = batches
        self._is_list = is_list

    def iterator(self, order: Sequence[int] | None = None, sequences: int | None = None) -> Any:
        """Return the ``data_iterator`` for a schedule: an iterator, a list of one per model chunk, or None.

        Args:
            order: Indices of the microbatches to return. By default each is returned once.
            sequences: Number of sequences of each microbatch, which :func:`divisible` allows to cut. None for all.

        Raises:
            SnipError: If ``order`` holds an index beyond the end of the data.
        """
        iterators = [None if batches is None else _copies(batches, order, sequences) for batches in self._batches]
        return iterators if self._is_list else iterators[0]


def _copies(batches: list[Any], order: Sequence[int] | None, sequences: int | None) -> Iterator[Any]:
    """Iterate over shallow copies, because a forward step may replace entries of its dictionary."""
    order = range(len(batches)) if order is None else order
    if order and max(order) >= len(batches):
        raise SnipError(f"a probe needs {max(order) + 1} microbatches, and the data holds {len(batches)} more")
    return (_copy(batches[i], sequences) if isinstance(batches[i], dict) else batches[i] for i in order)


def _copy(batch: dict[str, Any], sequences: int | None) -> dict[str, Any]:
    if sequences is None:
        return dict(batch)
    return {name: value if value is None else value[:sequences] for name, value in batch.items()}


def divisible(data_iterator: Any, args: argparse.Namespace) -> bool:
    """Return whether microbatches of ``train_step``'s ``data_iterator`` can be cut into sequences.

    They can be if they are dictionaries of tensors [microbatch, ...], as those of Megatron's data sets are, and not of
    packed sequences. A rank that reads no data takes the size of a microbatch from Megatron's global arguments, which
    Bridge does not have. The buffers of ``--tp-comm-overlap`` have the size of a whole microbatch.

    Args:
        data_iterator: See :func:`peek`.
        args: Megatron's arguments.
    """
    if args.tensor_model_parallel_size > 1 and (global_vars._GLOBAL_ARGS is not args or args.tp_comm_overlap):
        return False
    heads = [batches[:1] for batches in peek(data_iterator, 1)._batches if batches]
    return all(_is_divisible(batch, args.micro_batch_size) for (batch,) in heads)


def _is_divisible(batch: Any, size: int) -> bool:
    if not isinstance(batch, dict) or any("seqlen" in name for name in batch):
        return False
    tensors = [value for value in batch.values() if value is not None]
    return all(isinstance(value, torch.Tensor) and value.shape[:1] == (size,) for value in tensors)


@contextlib.contextmanager
def microbatches_of(args: argparse.Namespace, sequences: int) -> Iterator[None]:
    """Let microbatches have ``sequences`` sequences inside this context, for code that reads Megatron's arguments."""
    before = args.micro_batch_size
    args.micro_batch_size = sequences
    try:
        yield
    finally:
        args.micro_batch_size = before


def peek(data_iterator: Any, count: int) -> PeekedBatches:
    """Return the next ``count`` microbatches of ``train_step``'s ``data_iterator`` without consuming them.

    The source of the iterator is made peekable in place. The record that Megatron's rerun machine keeps of a step is
    not affected.

    Args:
        data_iterator: A RerunDataIterator, a list of them (virtual pipeline), or None on a rank that reads no data.
        count: Number of microbatches.

    Raises:
        SnipError: If the iterator is of another type.
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
    if iterator.replaying:  # the rerun machine repeats this step after a restart
        return list(iterator.saved_microbatches[iterator.replay_pos :][:count])
    if not isinstance(iterator.iterable, PeekableIterator):
        iterator.iterable = PeekableIterator(iterator.iterable)
    return iterator.iterable.peek(count)
