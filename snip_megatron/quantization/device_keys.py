"""Keys of stochastic rounding made on the device: what a captured CUDA graph reads, with the host's bits.

A seed is derived of (seed, step, global microbatch, linear, GEMM). In a captured backward the first two come from a
number that is written before each step, the microbatch from a counter that the backward itself advances: Python does
not run there. The bits are those of :func:`snip_megatron.quantization.rounding.derive_seeds` and ``key_words``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snip_megatron.quantization.rounding import splitmix64

_PARTS = 5  # of a seed: seed, step, microbatch, linear, GEMM
_SIDE = 4  # int32 between the words of two GEMMs: pointers stay 16-byte aligned
Words = tuple[Tensor, Tensor]
"""Key words, int32 [2], of the two GEMMs that read a gradient: dgrad, wgrad."""


class Identity(NamedTuple):
    """What the keys of a linear depend on, beside step and microbatch.

    Attributes:
        number: of the linear, the same in every layout.
        factor, offset: microbatch i of this rank is global microbatch i·factor + offset.
    """

    number: int
    factor: int
    offset: int


class DeviceKeys:
    """Keys of a rank's linears. Their memory stays where it is: graphs hold its address.

    Args:
        linears: one identity each.
        gemms: numbers of the two GEMMs.
        device: where keys are made and read.
    """

    def __init__(self, linears: Sequence[Identity], gemms: tuple[int, int], device: torch.device) -> None:
        identities = [(signed(splitmix64(each.number)), each.factor, each.offset, 0) for each in linears]
        self._identities = torch.tensor(identities, dtype=torch.int64, device=device).view(-1, 4)
        self._gemms = gemms
        self._state = torch.zeros(1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(len(linears), dtype=torch.int64, device=device)
        self._words = torch.zeros(len(linears), 2 * _SIDE, dtype=torch.int32, device=device)
        self._advance = _advance_by_kernel() if device.type == "cuda" else advance

    def start_step(self, seed: int, step: int) -> None:
        """The next key of every linear is that of the step's first microbatch. Waits for nothing."""
        state = _PARTS
        for part in (seed, step):
            state = splitmix64(state ^ splitmix64(part & _MASK))
        self._state.fill_(signed(state))
        self._counts.zero_()

    def next(self, place: int) -> Words:
        """Keys of the next microbatch of the linear at ``place``; its kernel runs where this is called."""
        self._advance(self._state, self._counts, self._identities, self._words, place, self._gemms)
        words = self._words[place]
        return words[:2], words[_SIDE : _SIDE + 2]


def advance(
    state: Tensor, counts: Tensor, identities: Tensor, words: Tensor, place: int, gemms: tuple[int, int]
) -> None:
    """The key words of ``counts[place]`` into ``words[place]``, then the count goes up by one: in plain torch.

    Args:
        state: int64 [1], seed and step mixed.
        counts: int64 [linears].
        identities: int64 [linears, 4]: mixed index, factor, offset, 0.
        words: int32 [linears, 8]: of the first GEMM at 0, of the second at 4.
        gemms: numbers of the GEMMs.
    """
    index, factor, offset, _ = identities[place].unbind()
    mixed = _mixed(_mixed(state ^ _mixed(counts[place] * factor + offset)) ^ index)
    counts[place] += 1
    for side, gemm in enumerate(gemms):
        key = _mixed(_mixed(mixed ^ signed(splitmix64(gemm))))
        words[place, side * _SIDE : side * _SIDE + 2] = torch.cat([key, key >> 32]).to(torch.int32)


_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """The same 64 bits as a signed number."""
    return value - (1 << 64) if value >> 63 else value


def _mixed(value: Tensor) -> Tensor:
    """``splitmix64`` of int64 tensors, which wrap."""
    value = value + signed(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@functools.cache
def _advance_by_kernel() -> Callable[..., None]:
    if importlib.util.find_spec("triton") is None:
        return advance
    from snip_megatron.quantization.kernels.keys import advance as by_kernel

    return by_kernel
