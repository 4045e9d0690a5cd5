"""What ranks exchange around GEMMs: token shards that they gather, and partial results that they sum.

Under sequence parallelism a rank holds consecutive tokens of X (column parallel linears) and of G (row parallel ones),
and gathers those of all ranks. In Megatron's layout [s, b, h] a shard of s is a range of the rows of the matrix
[s·b, h]. If the number of a rank's tokens is a multiple of 128, its tiles are tiles of the whole matrix, and it may
quantise them before the gather (``--snip-communication gather``). X has two operands. The rowwise operand is gathered
in the forward; the shard of the columnwise one is saved and gathered in the backward. Both GEMMs of G run in the
backward, so that both operands of G are gathered there, if the two have fewer bytes than G.

Sums are those of Y (row parallel linears) and of ∂L/∂X (column parallel ones) over tensor parallel ranks, in the
training dtype or, with ``--snip-communication all``, as quantised partial sums
(:mod:`snip_megatron.numerics.quantize.wire`), which are half the bytes. The distributed optimizer's reduce-scatter of
gradients may be such an exchange too (``--snip-gradient-reduction fp8``), which is a quarter of FP32's bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from snip_megatron.layers.amax import gathered_amaxes
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.operands import GemmOperand
from snip_megatron.numerics.products.shards import QuantizedShard
from snip_megatron.numerics.quantize import wire
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels import has_kernels
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.precision import Format

Group = dist.ProcessGroup | None
_ROW = 16 * TILE  # elements of gradients that kernels treat as a row, at most
_LARGE, _LONG_ROW = 2**29, 256 * TILE  # a bucket of so many elements, and its rows


@dataclass(frozen=True)
class Exchange[Result]:
    """An exchange in progress."""

    works: tuple[Any, ...]
    finish: Callable[[], Result]

    def wait(self) -> None:
        """Make the current stream, or a CPU, wait for the collectives."""
        for work in self.works:
            work.wait()

    def result(self) -> Result:
        """Wait for the collectives, and return the result."""
        self.wait()
        return self.finish()


def done(whole: Tensor) -> Exchange[Tensor]:
    """Return an exchange that is done: of a result that this rank has alone."""
    return Exchange((), lambda: whole)


# -- gathers -----------------------------------------------------------------------------------------------------------
def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Return the token shards x [s/tp, b, K] of all ranks along dimension 0."""
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def start_gather(shard: QuantizedShard, group: Group) -> Exchange[GemmOperand]:
    """Start the gather of the shards of all ranks. Its result is the operand of all tokens."""
    size = dist.get_world_size(group)
    gathered = tuple(t.new_empty((size, *t.shape)) for t in shard.tensors)
    pairs = zip(gathered, shard.tensors, strict=True)
    works = [dist.all_gather_into_tensor(out.flatten(0, 1), t, group=group, async_op=True) for out, t in pairs]
    return Exchange(tuple(works), lambda: shard.opened(gathered))


def quantized_shards(backend: GemmBackend, x: Tensor, spec: OperandSpec, group: Group) -> list[QuantizedShard | None]:
    """Quantise a shard of tokens [T/tp, cols], which has whole tiles, with the amax of the shards of all ranks.

    Returns the shards of the rowwise and of the columnwise operand; None for a GEMM that does not run.
    """
    formats = spec.rowwise, spec.columnwise
    amaxes = gathered_amaxes(x, formats, group)
    if amaxes[0] is amaxes[1]:
        pair = backend.quantize(x, spec._replace(amax=amaxes[0]))
    else:
        pair = (
            backend.quantize(x, spec._replace(columnwise=None, amax=amaxes[0]))[0],
            backend.quantize(x, spec._replace(rowwise=None, amax=amaxes[1]))[1],
        )
    found = zip(pair, formats, (1, 0), strict=True)
    return [None if fmt is None else backend.pack(operand, fmt, axis) for operand, fmt, axis in found]


def unquantized_shard(
    x: Tensor, backend: GemmBackend, wgrad: Format, rotation: Rotation | None = None
) -> QuantizedShard:
    """Return the shard x [s/tp, b, K] so that it is gathered as it is and then quantised for wgrad.

    ``rotation`` is that of wgrad's operand, if ``wgrad`` has a Hadamard transform.
    """
    spec = OperandSpec(None, wgrad, rotation=rotation)
    return QuantizedShard((x.contiguous(),), lambda whole: backend.quantize(whole.view(-1, whole.shape[-1]), spec)[1])


def has_whole_tiles(tokens: int) -> bool:
    """Return whether a shard of so many tokens consists of whole tiles."""
    return tokens > 0 and tokens % TILE == 0


# -- sums --------------------------------------------------------------------------------------------------------------
def start_all_reduce(x: Tensor, group: Group) -> Exchange[Tensor]:
    """Start the sum over ranks of ``x``, which is overwritten by it."""
    return Exchange((dist.all_reduce(x, group=group, async_op=True),), lambda: x)


def start_reduce_scatter(x: Tensor, group: Group, *, quantised: bool = False) -> Exchange[Tensor]:
    """Start the sum over ranks of ``x`` [T, ...], of which this rank gets its T/ranks tokens.

    ``quantised`` partial sums are matrices [T, cols]; the size of ``group``, the tensor parallel group, divides T.
    """
    if quantised:
        return _start_quantised(x, group)
    shard = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    return Exchange((dist.reduce_scatter_tensor(shard, x, group=group, async_op=True),), lambda: shard)


def _start_quantised(x: Tensor, group: Group) -> Exchange[Tensor]:
    """Start the sum of quantised ``x`` [rows, cols]."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    arithmetic = _arithmetic(x)
    sent = arithmetic.pack_partial(x)
    received = tuple(torch.empty_like(t) for t in sent)
    pairs = zip(received, sent, strict=True)
    works = tuple(dist.all_to_all_single(out, t, group=group, async_op=True) for out, t in pairs)
    elements, scales = (t.view(ranks, -1, t.shape[1]) for t in received)
    own = x.view(ranks, -1, x.shape[1])[rank]
    return Exchange(works, partial(arithmetic.add_partials, elements, scales, own, rank))


def start_gradient_reduction(shard: Tensor, whole: Tensor, group: Group) -> Exchange[Tensor]:
    """Start the sum over data parallel ranks of gradients, of which this rank gets its part.

    Partial sums are exchanged in FP8 with a scale for every 128 consecutive elements of a rank's part. ``shard`` [n],
    where the sum is written, may be this rank's part of ``whole`` [ranks·n], its gradients.
    """
    ranks, n = dist.get_world_size(group), shard.numel()
    if ranks == 1:
        return Exchange((), lambda: shard.copy_(whole))
    reduction = _start_quantised(as_rows(whole.view(ranks, n)), group)
    return Exchange(reduction.works, lambda: shard.copy_(reduction.finish().view(-1)[:n]))


def as_rows(parts: Tensor) -> Tensor:
    """Return the parts [ranks, n] of gradients as a matrix of whole tiles whose rows end where parts end.

    Long rows suit the kernels, and tiles are the same for any length. A launch has at most 65535 programs of 128 rows,
    so that a large bucket needs long rows. The parts are copied if they must be padded.
    """
    unit, longest = (TILE, _ROW) if parts.numel() < _LARGE else (_LONG_ROW, _LONG_ROW)
    if padding := -parts.shape[1] % unit:
        parts = functional.pad(parts, (0, padding))
    return parts.view(-1, math.gcd(parts.shape[1], longest))


def _arithmetic(x: Tensor) -> ModuleType:
    """Return the functions of ``wire`` for the device of ``x``."""
    if not has_kernels(x):
        return wire
    from snip_megatron.numerics.quantize.kernels import quantize as kernels

    return kernels
