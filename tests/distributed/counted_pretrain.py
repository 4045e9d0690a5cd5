"""The training entry, which counts what each step sends: module of warm ranks, with ``SENT=<file>``.

Rank 0 writes a list with an object for each training step: the bytes that it sent, by kind of collective.
Every collective of ``torch.distributed`` goes through a method of a process group, and these are wrapped. What is
counted are the tensors that the methods get, so that it shows what is really exchanged, in which dtype. The number of
bytes on the wire depends on the library's algorithm; the count is that of a ring, which no algorithm without reductions
in the network undercuts.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron import pretrain_gpt


def _each_other(count: int, size: int) -> int:
    """Each of the other ranks gets the tensor: an all-gather's input, a reduce-scatter's output."""
    return count * (size - 1)


def _all_but_own(count: int, size: int) -> int:
    """All parts of the tensor but the own one are passed on."""
    return count * (size - 1) // size


def _twice(count: int, size: int) -> int:
    """A reduce-scatter and an all-gather."""
    return 2 * count * (size - 1) // size


def _once(count: int, size: int) -> int:
    return count


_METHODS: Mapping[str, tuple[str, int, Callable[[int, int], int]]] = {
    "_allgather_base": ("all_gather", 1, _each_other),
    "allgather": ("all_gather", 1, _each_other),
    "allgather_coalesced": ("all_gather", 1, _each_other),
    "allgather_into_tensor_coalesced": ("all_gather", 1, _each_other),
    "_reduce_scatter_base": ("reduce_scatter", 0, _each_other),
    "reduce_scatter": ("reduce_scatter", 0, _each_other),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0, _each_other),
    "allreduce": ("all_reduce", 0, _twice),
    "allreduce_coalesced": ("all_reduce", 0, _twice),
    "alltoall_base": ("all_to_all", 1, _all_but_own),
    "alltoall": ("all_to_all", 1, _all_but_own),
    "broadcast": ("broadcast", 0, _all_but_own),
    "send": ("send", 0, _once),
}
"""Method → kind of collective, the argument that counts, and what is sent of its bytes in a group of a size."""
_SPLITS = 3  # the argument of alltoall_base that says how many rows of the tensor each rank gets; empty: equally many


class Traffic:
    """Bytes sent by kind of collective: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``,
    ``broadcast`` (the mean of the group's ranks) and ``send`` (from one pipeline stage to another).
    """

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()

    def install(self) -> None:
        """Count from now on."""
        for name, entry in _METHODS.items():
            setattr(dist.ProcessGroup, name, self._counted(name, getattr(dist.ProcessGroup, name), *entry))

    def take(self) -> dict[str, int]:
        """Return the bytes since the last call, without the kinds that sent none."""
        sent, self._sent = self._sent, Counter()
        return {kind: count for kind, count in sorted(sent.items()) if count}

    def _counted(
        self, method: str, original: Callable[..., Any], kind: str, place: int, sent: Callable[[int, int], int]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if place < len(args):
                count = _bytes(args[place])
                splits = args[_SPLITS] if method == "alltoall_base" and len(args) > _SPLITS else None
                if splits:  # parts of different sizes
                    self._sent[kind] += count - count * splits[group.rank()] // max(1, sum(splits))
                else:
                    self._sent[kind] += sent(count, group.size())
            return original(group, *args, **kwargs)

        return counted


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def main() -> int:
    from snip_megatron.megatron import compat

    traffic, steps = Traffic(), list[dict[str, int]]()
    traffic.install()

    def wrap(train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            traffic.take()  # leaves out what SNIP exchanged between the steps
            result = train_step(*args, **kwargs)
            steps.append(traffic.take())
            return result

        return step

    compat.wrap_train_step(wrap)
    code = pretrain_gpt.main()
    if os.environ["RANK"] == "0":
        Path(os.environ["SENT"]).write_text(json.dumps(steps))
    return code
