"""The gather of updated parameters over data parallel ranks, in which the weights of linears are quantised already.

The distributed optimizer keeps the parameters of a bucket in one flat buffer. Each rank updates a range of it, and
gathers the ranges of the others. Where both GEMMs that read a weight are quantised, they need no bf16 weight. Each rank
then quantises its range (:mod:`snip_megatron.quantization.ranges`) and the ranks gather the elements. Everything else
is gathered as it is, in the same collective.

What other ranks hold of such a weight is then missing in the buffer of this rank, and is set to NaN there. A reader of
the bf16 weight needs a gather of the buffer as it is first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers.amax import largest
from snip_megatron.precision import Format
from snip_megatron.quantization import ranges
from snip_megatron.quantization.formats import SPECS
from snip_megatron.quantization.ranges import (
    BF16_BYTES,
    QuantizedWeight,
    joined,
    range_bytes,
    scales,
    tile_counts,
)

_ALIGNMENT = 16  # bytes: what a rank holds of each parameter begins at a multiple
_WORTH = 0.95  # of the bytes: bytes are evened out if no more remain


@dataclass(frozen=True)
class BufferedParameter:
    """A parameter in a flat buffer.

    Attributes:
        start: index of its first element in the buffer.
        shape: its shape. That of a quantised parameter is (N, K).
        formats: the formats in which it is gathered, each once; empty: as it is.
    """

    start: int
    shape: tuple[int, ...]
    formats: tuple[Format, ...] = ()

    @property
    def stop(self) -> int:
        """The index after its last element in the buffer."""
        return self.start + torch.Size(self.shape).numel()

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of a quantised parameter."""
        rows, cols = self.shape
        return rows, cols


Weights = dict[BufferedParameter, dict[Format, QuantizedWeight]]
"""The weights that are gathered quantised, in each of their formats."""


@dataclass(frozen=True)
class _Range:
    """What a rank holds of a parameter, in one format; None: as it is.

    Attributes:
        parameter: the parameter.
        begin, end: the elements, as indices in the buffer.
        format: the format.
        place: its place in the bytes of the rank, which begins at a multiple of 16.
    """

    parameter: BufferedParameter
    begin: int
    end: int
    format: Format | None
    place: slice


@dataclass(frozen=True)
class GatheredParameters:
    """A gather in progress.

    Attributes:
        work: handle of the collective.
        finish: returns the weights that are gathered quantised, once the collective is done. It copies the other
            parameters to the buffer.
    """

    work: Any
    finish: Callable[[], Weights]

    def result(self) -> Weights:
        """Make the current stream, or a CPU, wait for the gather, and return the quantised weights."""
        self.work.wait()
        return self.finish()


class _Stream:
    """The bytes of all ranks, one after the other, and how they are gathered.

    An all-gather takes equally many bytes from each rank. Ranks with more quantised weights have fewer bytes. Either
    all are filled up to the longest, or an all-to-all first moves bytes between neighbours, so that each rank has an
    equal part of the stream. The way with fewer bytes is taken.

    Args:
        sizes: the number of bytes of each rank.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = [_aligned(size) for size in sizes]
        ranks, longest = len(sizes), max(self.sizes)
        self._starts = [sum(self.sizes[:rank]) for rank in range(ranks)]
        self._part = _aligned(-(-sum(self.sizes) // ranks))
        stays = [self._shared(rank, rank) for rank in range(ranks)]
        moved = max(size - stay for size, stay in zip(self.sizes, stays, strict=True))
        self._evens_out = (ranks - 1) * self._part + moved < _WORTH * (ranks - 1) * longest
        if not self._evens_out:
            self._part, self._starts = longest, [rank * longest for rank in range(ranks)]

    def _shared(self, rank: int, other: int) -> int:
        """Return how many bytes of ``rank`` are in the part of the stream that ``other`` gets."""
        begin = max(self._starts[rank], other * self._part)
        end = min(self._starts[rank] + self.sizes[rank], (other + 1) * self._part)
        return max(0, end - begin)

    def start(self, own: Tensor, rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], Any]:
        """Start the gather of uint8 ``own``. Returns the bytes of each rank, and a handle to wait for them."""
        ranks = len(self.sizes)
        part = own.new_zeros(self._part)
        if self._evens_out:
            sent = [self._shared(rank, other) for other in range(ranks)]
            got = [self._shared(other, rank) for other in range(ranks)]
            dist.all_to_all_single(part[: sum(got)], own, got, sent, group=group)
        else:
            part[: len(own)] = own
        whole = own.new_empty(ranks * self._part)
        work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        return [whole[at : at + size] for at, size in zip(self._starts, self.sizes, strict=True)], work


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class ParameterGather:
    """The gather of one bucket.

    Args:
        buffer: bf16 [ranks · n], the bucket's parameters. Rank r updates elements r·n to (r + 1)·n.
        group: the ranks that share the bucket.
        parameters: all parameters of the bucket. Between them there may be padding, which is not gathered.
        tensor_parallel: the ranks that share weights, for formats with one scale for the whole tensor; None if weights
            are not sharded.
    """

    def __init__(
        self,
        buffer: Tensor,
        group: dist.ProcessGroup,
        parameters: Sequence[BufferedParameter],
        tensor_parallel: dist.ProcessGroup | None = None,
    ) -> None:
        self._buffer, self._group, self._tensor_parallel = buffer, group, tensor_parallel
        self._arithmetic = _arithmetic(buffer)
        self._rank, ranks = group.rank(), group.size()
        self._parameters = tuple(parameters)
        self._length = buffer.numel() // ranks
        self._ranges = [list(self._ranges_of(rank)) for rank in range(ranks)]
        self._stream = _Stream([held[-1].place.stop if held else 0 for held in self._ranges])

    def _ranges_of(self, rank: int) -> Iterator[_Range]:
        """Yield what ``rank`` holds, in order. All ranks compute the same."""
        at = 0
        for parameter in self._parameters:
            begin = max(parameter.start, rank * self._length)
            end = min(parameter.stop, (rank + 1) * self._length)
            if begin >= end:
                continue
            for fmt in parameter.formats or (None,):
                size = BF16_BYTES * (end - begin) if fmt is None else range_bytes(end - begin, fmt)
                yield _Range(parameter, begin, end, fmt, slice(at, at + size))
                at += _aligned(size)

    def start(self) -> GatheredParameters:
        """Start the gather. Until it is done, nothing may read what other ranks hold."""
        scale = self._scales()
        own = self._buffer.new_zeros(self._stream.sizes[self._rank], dtype=torch.uint8)
        for part in self._ranges[self._rank]:
            x = self._buffer[part.begin : part.end]
            if part.format is None:
                own[part.place] = x.view(torch.uint8)
                continue
            parameter, fmt = part.parameter, part.format
            start = part.begin - parameter.start
            own[part.place] = self._arithmetic.encode_range(x, start, parameter.matrix, fmt, scale[parameter, fmt])
        received, work = self._stream.start(own, self._rank, self._group)
        return GatheredParameters(work, partial(self._opened, received, scale))

    def forget_others(self) -> None:
        """Set what other ranks hold of quantised parameters to NaN, so that no reader takes an old weight for a new."""
        for rank, held in enumerate(self._ranges):
            for part in held:
                if rank != self._rank and part.format is not None:
                    self._buffer[part.begin : part.end].fill_(torch.nan)

    def _scales(self) -> dict[tuple[BufferedParameter, Format], Tensor]:
        """Return the scales of the tiles of all quantised parameters, from the amaxes of all ranks."""
        wanted = [(parameter, fmt) for parameter in self._parameters for fmt in parameter.formats]
        if not wanted:
            return {}
        wanted.sort(key=lambda pair: not SPECS[pair[1]].tile)  # those with one scale for the tensor stand at the end
        own = {(part.parameter, part.format): part for part in self._ranges[self._rank]}
        amaxes, shared = [], 0
        for parameter, fmt in wanted:
            part = own.get((parameter, fmt))
            rows, cols = tile_counts(parameter.matrix, fmt)
            shared += not SPECS[fmt].tile
            if part is None:
                amaxes.append(self._buffer.new_zeros(rows * cols, dtype=torch.float32))
                continue
            x = self._buffer[part.begin : part.end]
            amaxes.append(self._arithmetic.range_amax(x, part.begin - parameter.start, parameter.matrix, fmt).view(-1))
        sizes = [len(amax) for amax in amaxes]
        found = largest(torch.cat(amaxes), self._group)
        if shared and self._tensor_parallel is not None:
            found[-shared:] = largest(found[-shared:], self._tensor_parallel)
        parts = torch.split(found, sizes)
        return {
            (parameter, fmt): scales(amax.view(tile_counts(parameter.matrix, fmt)), fmt)
            for (parameter, fmt), amax in zip(wanted, parts, strict=True)
        }

    def _opened(self, received: list[Tensor], scale: dict[tuple[BufferedParameter, Format], Tensor]) -> Weights:
        """Copy what is gathered as it is to the buffer, and join the ranges of the rest. ``received``: by rank."""
        parts: dict[tuple[BufferedParameter, Format], list[tuple[Tensor, int]]] = {pair: [] for pair in scale}
        for rank, held in enumerate(self._ranges):
            for part in held:
                found = received[rank][part.place]
                if part.format is not None:
                    parts[part.parameter, part.format].append((found, part.end - part.begin))
                elif rank != self._rank:
                    self._buffer[part.begin : part.end] = found.view(self._buffer.dtype)
        weights: Weights = {}
        for (parameter, fmt), found_parts in parts.items():
            made = joined(found_parts, parameter.matrix, fmt, scale[parameter, fmt])
            weights.setdefault(parameter, {})[fmt] = made
        return weights


def _arithmetic(x: Tensor) -> ModuleType:
    """Return the functions of ``ranges`` for the device of ``x``."""
    if not x.is_cuda or importlib.util.find_spec("triton") is None:
        return ranges
    from snip_megatron.quantization.kernels import ranges as kernels

    return kernels
