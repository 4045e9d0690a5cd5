"""The gathers of a linear: of token shards, in bf16 or quantised.

Under sequence parallelism a rank holds consecutive tokens of X (column parallel linears) and of G (row parallel ones),
and gathers those of all ranks. In Megatron's layout [s, b, h] a shard of s is a range of the rows of the matrix
[s·b, h]. If the number of a rank's tokens is a multiple of 128, its tiles are tiles of the whole matrix. It may then
quantise them before the gather, and the GEMMs get the same bits.

X has two operands. The operand of fprop has tiles along features and is gathered in the forward. The operand of wgrad
has tiles along tokens; its shard is saved and gathered in the backward. Both GEMMs of G run in the backward, so that
both operands of G are gathered there. This is done only if the two have fewer bytes than G, which two 8-bit operands do
not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.gemm.backend import GemmBackend, Sides
from snip_megatron.gemm.operands import Side
from snip_megatron.gemm.parcels import Parcel
from snip_megatron.layers.context import LinearHandle
from snip_megatron.precision import Format
from snip_megatron.quantization.formats import TILE
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.wire import bytes_per_element

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Gather:
    """A gather in progress.

    Attributes:
        parcel: this rank's shard.
        gathered: the tensors of all ranks, [ranks, \\*shape of the shard's].
        works: handles of the collectives.
    """

    parcel: Parcel
    gathered: tuple[torch.Tensor, ...]
    works: tuple[Any, ...]

    def wait(self) -> None:
        """Make the current stream, or a CPU, wait for the gather."""
        for work in self.works:
            work.wait()

    def opened(self) -> Side:
        """Return the operand of all tokens. Call :meth:`wait` first."""
        return self.parcel.opened(self.gathered)


def start_gather(parcel: Parcel, group: Group) -> Gather:
    """Start the gather of the shards of all ranks."""
    size = dist.get_world_size(group)
    gathered = tuple(t.new_empty((size, *t.shape)) for t in parcel.tensors)
    pairs = zip(gathered, parcel.tensors, strict=True)
    works = (dist.all_gather_into_tensor(out.flatten(0, 1), t, group=group, async_op=True) for out, t in pairs)
    return Gather(parcel, gathered, tuple(works))


def gather_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the token shards x [s/tp, b, K] of all ranks along dimension 0."""
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def plain_shard(x: torch.Tensor, backend: GemmBackend, wgrad: Format, rotation: Rotation | None = None) -> Parcel:
    """Return the shard x [s/tp, b, K] as a parcel that is quantised for wgrad after it is gathered.

    ``rotation`` is that of wgrad's operand, if ``wgrad`` has a Hadamard transform.
    """

    def opened(gathered: torch.Tensor) -> Side:
        whole = gathered.view(-1, gathered.shape[-1])
        side: Side = backend.quantize_input(whole, None, wgrad, rotation=rotation)[1]
        return side

    return Parcel((x.contiguous(),), opened)


# -- when shards are quantised -----------------------------------------------------------------------------------------
def has_whole_tiles(tokens: int) -> bool:
    """Return whether a shard of so many tokens consists of whole tiles."""
    return tokens > 0 and tokens % TILE == 0


def packs_gradient(handle: LinearHandle, x: torch.Tensor) -> bool:
    """Return whether the output gradient of a row parallel linear is to be quantised before it is gathered.

    Args:
        handle: the linear. The pass must be one of training.
        x: its input [s, b, K local], with the tokens of all ranks.
    """
    _, dgrad, wgrad = handle.formats
    if not handle.context.packs or Format.BF16 in (dgrad, wgrad):
        return False
    size = x.element_size()
    tokens, left = divmod(math.prod(x.shape[:-1]), handle.tp_size)
    saves = bytes_per_element(dgrad, unquantised=size) + bytes_per_element(wgrad, unquantised=size) < size
    return saves and not left and has_whole_tiles(tokens)


def quantised_by(
    quantise: Callable[..., Sides],
    shard: torch.Tensor,
    formats: tuple[Format, Format | None],
    amaxes: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Sides:
    """Quantise a shard for both GEMMs, in one call if they have one amax.

    Args:
        quantise: a function of (matrix, first format, second format, amax=) that returns both operands.
        shard, formats: the arguments of :func:`snip_megatron.layers.amax.gathered_amaxes`.
        amaxes: its result.
    """
    if amaxes[0] is amaxes[1]:
        return quantise(shard, *formats, amax=amaxes[0])
    return (
        quantise(shard, formats[0], None, amax=amaxes[0])[0],
        quantise(shard, None, formats[1], amax=amaxes[1])[1],
    )
