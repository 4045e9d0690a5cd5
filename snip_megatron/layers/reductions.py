"""Sums over ranks, exchanged in the training dtype or as quantised partial sums.

Those of a linear over tensor parallel ranks are of Y (row parallel linears) and of ∂L/∂X (column parallel ones). Under
sequence parallelism every rank has a partial result for all tokens, and wants the sum for its own tokens. That is a
reduce-scatter in the training dtype, or with ``--snip-communication all`` an exchange of quantised partial sums
(:mod:`snip_megatron.quantization.partials`), which is half the bytes. The distributed optimizer's reduce-scatter of
gradients may be such an exchange too (``--snip-gradient-reduction fp8``), which is a quarter of FP32's bytes.
"""

from __future__ import annotations

import importlib.util
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

from snip_megatron.quantization import partials
from snip_megatron.quantization.formats import TILE

Group = dist.ProcessGroup | None
_ROW = 16 * TILE  # elements of gradients that kernels treat as a row


@dataclass(frozen=True)
class Reduction:
    """A sum over ranks in progress.

    Attributes:
        works: handles of the collectives.
        finish: returns the sum once the collectives are done.
    """

    works: tuple[Any, ...]
    finish: Callable[[], Tensor]

    def result(self) -> Tensor:
        """Make the current stream, or a CPU, wait for the collectives, and return the sum."""
        for work in self.works:
            work.wait()
        return self.finish()


def no_reduction(whole: Tensor) -> Reduction:
    """Return a reduction that is done: of a result that this rank has alone."""
    return Reduction((), lambda: whole)


def start_all_reduce(x: Tensor, group: Group) -> Reduction:
    """Start the sum over ranks of ``x``, which is overwritten by it."""
    work = dist.all_reduce(x, group=group, async_op=True)
    return Reduction((work,), lambda: x)


def start_reduce_scatter(x: Tensor, group: Group, *, quantised: bool = False) -> Reduction:
    """Start the sum over ranks of ``x`` [T, ...], of which this rank gets its T/ranks tokens.

    Args:
        x: this rank's partial result. Quantised ones are matrices [T, cols].
        group: the tensor parallel group, whose size divides T.
        quantised: whether partial sums are quantised before they are exchanged.
    """
    if quantised:
        return _start_quantised(x, group)
    shard = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    work = dist.reduce_scatter_tensor(shard, x, group=group, async_op=True)
    return Reduction((work,), lambda: shard)


def _start_quantised(x: Tensor, group: Group) -> Reduction:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    arithmetic = _arithmetic(x)
    sent = arithmetic.pack_partial(x)
    received = tuple(torch.empty_like(t) for t in sent)
    pairs = zip(received, sent, strict=True)
    works = tuple(dist.all_to_all_single(out, t, group=group, async_op=True) for out, t in pairs)
    elements, scales = (t.view(ranks, -1, t.shape[1]) for t in received)
    own = x.view(ranks, -1, x.shape[1])[rank]
    return Reduction(works, partial(arithmetic.add_partials, elements, scales, own, rank))


def start_gradient_reduction(shard: Tensor, whole: Tensor, group: Group) -> Reduction:
    """Start the sum over data parallel ranks of gradients, of which this rank gets its part.

    Partial sums are exchanged in FP8 with a scale for every 128 consecutive elements of a rank's part.

    Args:
        shard: [n], where the sum is written; it may be this rank's part of ``whole``.
        whole: [ranks·n], this rank's gradients.
        group: the data parallel group.
    """
    ranks, n = dist.get_world_size(group), shard.numel()
    if ranks == 1:
        return Reduction((), lambda: shard.copy_(whole))
    parts = functional.pad(whole.view(ranks, n), (0, -n % TILE))
    # Rows are as long as possible for the kernels: tiles are the same.
    reduction = _start_quantised(parts.reshape(-1, math.gcd(parts.shape[1], _ROW)), group)
    return Reduction(reduction.works, lambda: shard.copy_(reduction.finish().view(-1)[:n]))


def rehearse_quantised(x: Tensor, ranks: int) -> None:
    """Quantise and add partial sums like ``x`` [T, cols] without an exchange, so that kernels are compiled."""
    arithmetic = _arithmetic(x)
    elements, scales = (t.view(ranks, -1, t.shape[1]) for t in arithmetic.pack_partial(x))
    arithmetic.add_partials(elements, scales, x.view(ranks, -1, x.shape[1])[0], 0)


def _arithmetic(x: Tensor) -> ModuleType:
    """Return the functions of ``partials`` for the device of ``x``."""
    if not x.is_cuda or importlib.util.find_spec("triton") is None:
        return partials
    from snip_megatron.quantization.kernels import partials as kernels

    return kernels
