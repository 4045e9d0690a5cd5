"""Reads microbatches of training, the next ones or some of earlier steps, without consuming them."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import global_vars

from snip_megatron.megatron.compat.versions import check_signature
from snip_megatron.precision.errors import SnipError

check_signature(RerunDataIterator.__init__, "self", "iterable")

_RAMPS = ("--step-batch-size-schedule", "--rampup-batch-size")


def batch_size_ramp(args: argparse.Namespace) -> str | None:
    """Return the argument by which the batch size grows in training. None if there is none."""
    return next((name for name in _RAMPS if getattr(args, name[2:].replace("-", "_"), None) is not None), None)


_KEPT_STEPS = 3  # number of steps whose microbatches are kept: the guard sees the figures of a step two steps later


class PeekableIterator:
    """An iterator with :meth:`peek`, which returns the next items without consuming them.

    ``past`` has the first items of the latest steps, after :meth:`keep`.
    """

    def __init__(self, items: Any) -> None:
        self._items = items
        self._ahead: collections.deque[Any] = collections.deque()
        self.past: dict[int, list[Any]] = {}
        self._count = 0

    def __iter__(self) -> PeekableIterator:
        return self

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else next(self._items)
        if self.past and len(of_step := self.past[max(self.past)]) < self._count:
            of_step.append(_copy(item, None))
        return item

    def keep(self, step: int, count: int) -> None:
        """Keep the first ``count`` items that are read from now on, as those of ``step``."""
        self.past, self._count = {n: self.past[n] for n in sorted(self.past)[1 - _KEPT_STEPS :] if n < step}, count
        self.past[step] = []

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


def repeated(data_iterator: Any, order: Sequence[int], sequences: int | None = None) -> Any:
    """Return an iterator over microbatches that ``train_step`` will read, without consuming them.

    The source of ``data_iterator`` is made peekable in place. The record of a step in Megatron's rerun machine is not
    affected. Raises SnipError if the iterator is of another type, or if ``order`` exceeds the end of the data.

    Args:
        data_iterator: A RerunDataIterator, a list of them (virtual pipeline), or None on a rank that reads no data.
        order: Numbers of the microbatches, 0 being the next one. A number may occur twice.
        sequences: Number of sequences to take from each microbatch if it is :func:`divisible`. None takes all.
    """
    if isinstance(data_iterator, list):
        return [repeated(each, order, sequences) for each in data_iterator]
    if data_iterator is None:
        return None
    count = max(order, default=-1) + 1
    batches = _peek(data_iterator, count)
    if len(batches) < count:
        raise SnipError(
            f"a probe or a second validation needs {count} microbatches, and the data holds {len(batches)} more"
        )
    return (_copy(batches[i], sequences) for i in order)


def keep_microbatches(data_iterator: Any, step: int, count: int) -> None:
    """Keep the first ``count`` microbatches that ``train_step`` will read in ``step``, for some steps."""
    for each in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
        if each is not None:
            _peekable(each).keep(step, count)


def past_microbatches(data_iterator: Any, step: int, count: int) -> Any:
    """Return an iterator like ``data_iterator`` over ``count`` microbatches of ``step``, or raise SnipError."""
    if isinstance(data_iterator, list):
        return [past_microbatches(each, step, count) for each in data_iterator]
    if data_iterator is None:
        return None
    past = _peekable(data_iterator).past.get(step, [])
    if len(past) < count:
        raise SnipError(f"the microbatches of step {step} were not kept")
    return RerunDataIterator(iter(past))


def _peek(iterator: Any, count: int) -> list[Any]:
    source = _peekable(iterator)
    if iterator.replaying:  # the rerun machine repeats this step after a restart
        return list(iterator.saved_microbatches[iterator.replay_pos :][:count])
    return source.peek(count)


def _peekable(iterator: Any) -> PeekableIterator:
    if not isinstance(iterator, RerunDataIterator):
        raise SnipError(f"the data iterator is a {type(iterator).__name__}, not Megatron's RerunDataIterator")
    if not isinstance(iterator.iterable, PeekableIterator):
        iterator.iterable = PeekableIterator(iterator.iterable)
    return iterator.iterable


def _copy(batch: Any, sequences: int | None) -> Any:
    """Copy a microbatch, because a forward step may replace entries of its dictionary."""
    if not isinstance(batch, dict):
        return batch
    return {name: value if value is None or sequences is None else value[:sequences] for name, value in batch.items()}


def divisible(data_iterator: Any, args: argparse.Namespace) -> bool:
    """Return whether a pass can take some sequences of the microbatches of ``data_iterator`` alone.

    Microbatches must be dictionaries of tensors [microbatch, ...], as those of Megatron's data sets are, and must not
    be packed. A rank that reads no data takes the size of a microbatch from Megatron's global arguments, which Bridge
    does not have. The buffers of ``--tp-comm-overlap`` have the size of a whole microbatch.
    """
    if args.tensor_model_parallel_size > 1 and (global_vars._GLOBAL_ARGS is not args or args.tp_comm_overlap):
        return False
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    for batch in (batch for each in iterators if each is not None for batch in _peek(each, 1)):
        if not isinstance(batch, dict) or any("seqlen" in name for name in batch):
            return False
        tensors = [value for value in batch.values() if value is not None]
        if not all(isinstance(each, torch.Tensor) and each.shape[:1] == (args.micro_batch_size,) for each in tensors):
            return False
    return True
