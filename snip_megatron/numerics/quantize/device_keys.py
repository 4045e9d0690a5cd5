"""Keys of stochastic rounding that the device computes, for CUDA graphs.

A key depends on (seed, step, global microbatch, linear, GEMM). A captured backward runs no Python, so it reads seed and
step from memory that is written before each step, and the microbatch from a counter that it advances itself. The keys
have the bits of :func:`.rounding.derive_seeds` and :func:`.rounding.key_words`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.kernels import has_kernels
from snip_megatron.numerics.quantize.rounding import MASK64, key_words, splitmix64

_PARTS = 5  # of a seed: seed, step, microbatch, linear, GEMM
_SIDE = 4  # int32 between the words of two GEMMs: pointers stay 16-byte aligned
KeyWords = tuple[Tensor, Tensor]  # key words, int32 [2] each, of dgrad and wgrad, the two GEMMs that read a gradient


class LinearIdentity(NamedTuple):
    """What the keys of a linear depend on, apart from seed, step and microbatch."""

    number: int  # the number of the linear, which is the same in every layout
    # factor, offset: microbatch i of this rank is global microbatch i·factor + offset
    factor: int
    offset: int


class DeviceKeys:
    """The keys of a rank's linears. Their addresses never change, because graphs hold them.

    ``gemms`` are the numbers of the two GEMMs.
    """

    def __init__(self, linears: Sequence[LinearIdentity], gemms: tuple[int, int], device: torch.device) -> None:
        identities = [(signed(splitmix64(each.number)), each.factor, each.offset, 0) for each in linears]
        self._identities = torch.tensor(identities, dtype=torch.int64, device=device).view(-1, 4)
        self._gemms = gemms
        self._state = torch.zeros(1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(len(linears), dtype=torch.int64, device=device)
        self._words = torch.zeros(len(linears), 2 * _SIDE, dtype=torch.int32, device=device)
        self._advance: Callable[..., None] = advance
        if has_kernels(self._state):
            from snip_megatron.numerics.quantize.kernels.quantize import advance as by_kernel

            self._advance = by_kernel

    def start_step(self, seed: int, step: int) -> None:
        """Start a step: the next key of every linear is that of its first microbatch. Does not wait for the device."""
        state = _PARTS
        for part in (seed, step):
            state = splitmix64(state ^ splitmix64(part & MASK64))
        self._state.fill_(signed(state))
        self._counts.zero_()

    def next(self, place: int) -> KeyWords:
        """Return the keys of the next microbatch of the linear at ``place``, which a kernel computes."""
        self._advance(self._state, self._counts, self._identities, self._words, place, self._gemms)
        words = self._words[place]
        return words[:2], words[_SIDE : _SIDE + 2]


def advance(
    state: Tensor, counts: Tensor, identities: Tensor, words: Tensor, place: int, gemms: tuple[int, int]
) -> None:
    """Write the key words of microbatch ``counts[place]`` to ``words[place]``, and increment the count. In plain torch.

    Args:
        state: int64 [1], the mixed seed and step.
        counts: int64 [linears], the next microbatch of each linear.
        identities: int64 [linears, 4]: mixed number, factor, offset and 0 of each linear.
        words: int32 [linears, 8]: the key words of the first GEMM at 0, those of the second at 4.
        place: index of the linear.
        gemms: the numbers of the GEMMs.
    """
    number, factor, offset, _ = identities[place].tolist()
    seed = splitmix64(int(state) ^ splitmix64(int(counts[place]) * factor + offset & MASK64))
    seed = splitmix64(seed ^ number)
    counts[place] += 1
    for side, gemm in enumerate(gemms):
        key = key_words(splitmix64(seed ^ splitmix64(gemm)))
        words[place, side * _SIDE : side * _SIDE + 2] = torch.tensor([signed(word << 32) >> 32 for word in key])


def signed(value: int) -> int:
    """Return the same 64 bits as a signed number."""
    return value - (1 << 64) if value >> 63 else value
