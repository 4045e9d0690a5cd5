"""Sums over ranks, exchanged in the training dtype or as quantised partial sums.

Those of a linear over tensor parallel ranks are of Y (row parallel linears) and of ∂L/∂X (column parallel ones). Under
sequence parallelism every rank has a partial result for all tokens, and wants the sum for its own tokens. That is a
reduce-scatter in the training dtype, or with ``--snip-communication all`` an exchange of quantised partial sums
(:mod:`snip_megatron.quantization.wire`), which is half the bytes. The distributed optimizer's reduce-scatter of
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

from snip_megatron.quantization import wire
from snip_megatron.quantization.formats import TILE

Group = dist.ProcessGroup | None
_ROW = 16 * TILE  # elements of gradients that kernels treat as a row, at most
_LARGE, _LONG_ROW = 2**29, 256 * TILE  # a bucket of so many elements, and its rows


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


def _start_quantised(x: Tensor, group: Group, lost: Tensor | None = None) -> Reduction:
    """Start the sum of quantised ``x`` [rows, cols]. ``lost`` gets what quantisation loses of it."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    arithmetic = _arithmetic(x)
    sent = arithmetic.pack_partial(x)
    received = tuple(torch.empty_like(t) for t in sent)
    pairs = zip(received, sent, strict=True)
    works = tuple(dist.all_to_all_single(out, t, group=group, async_op=True) for out, t in pairs)
    if lost is not None:
        packed = (t.unsqueeze(0) for t in sent)
        sent_values = arithmetic.add_partials(*packed, x, -1)  # of one rank, which is another one
        error = torch.sub(x, sent_values, out=sent_values)
        lost.copy_(error.nan_to_num_(0.0, 0.0, 0.0))
        lost.view(ranks, -1)[rank] = 0.0  # not sent
    elements, scales = (t.view(ranks, -1, t.shape[1]) for t in received)
    own = x.view(ranks, -1, x.shape[1])[rank]
    return Reduction(works, partial(arithmetic.add_partials, elements, scales, own, rank))


class ErrorFeedback:
    """What quantisation has lost of a rank's gradients, in bf16. It is added to the gradients of the next step.

    Checkpoints do not hold it. It is reset whenever one is written, so that a resumed run has the bits of the run that
    wrote the checkpoint and went on.
    """

    def __init__(self) -> None:
        self._lost: dict[tuple[int, int], Tensor] = {}

    def reset(self) -> None:
        """Take nothing into the next step. The memory stays where it is, because a captured CUDA graph reads it."""
        for lost in self._lost.values():
            lost.zero_()

    def forget(self) -> None:
        """Release the memory of a model that is no more. Another model's gradients may get the same addresses."""
        self._lost.clear()

    def of(self, whole: Tensor, rows: Tensor) -> Tensor:
        """Return what was lost of the gradients at the address of ``whole``, in the shape of ``rows``."""
        key = (whole.data_ptr(), rows.numel())
        if key not in self._lost:
            self._lost[key] = torch.zeros_like(rows, dtype=torch.bfloat16)
        return self._lost[key]


def start_gradient_reduction(
    shard: Tensor, whole: Tensor, group: Group, feedback: ErrorFeedback | None = None
) -> Reduction:
    """Start the sum over data parallel ranks of gradients, of which this rank gets its part.

    Partial sums are exchanged in FP8 with a scale for every 128 consecutive elements of a rank's part.

    Args:
        shard: [n], where the sum is written; it may be this rank's part of ``whole``.
        whole: [ranks·n], this rank's gradients. With ``feedback`` they are changed.
        group: the data parallel group.
        feedback: keeps what quantisation loses until the next step; None to lose it.
    """
    ranks, n = dist.get_world_size(group), shard.numel()
    if ranks == 1:
        return Reduction((), lambda: shard.copy_(whole))
    rows = as_rows(whole.view(ranks, n))
    lost = None if feedback is None else feedback.of(whole, rows)
    if lost is not None:
        rows.add_(lost)
    reduction = _start_quantised(rows, group, lost)
    return Reduction(reduction.works, lambda: shard.copy_(reduction.finish().view(-1)[:n]))


def as_rows(parts: Tensor) -> Tensor:
    """Return the parts [ranks, n] of gradients as a matrix of whole tiles whose rows end where parts end.

    Long rows suit the kernels, and tiles are the same for any length. A launch has at most 65535 programs of 128 rows,
    so that a large bucket needs long rows. The parts are copied if they must be padded.
    """
    unit, longest = (TILE, _ROW) if parts.numel() < _LARGE else (_LONG_ROW, _LONG_ROW)
    if padding := -parts.shape[1] % unit:
        parts = functional.pad(parts, (0, padding))
    return parts.view(-1, math.gcd(parts.shape[1], longest))


def rehearse_quantised(x: Tensor, ranks: int) -> None:
    """Quantise and add partial sums like ``x`` [T, cols] without an exchange, so that kernels are compiled."""
    arithmetic = _arithmetic(x)
    elements, scales = (t.view(ranks, -1, t.shape[1]) for t in arithmetic.pack_partial(x))
    arithmetic.add_partials(elements, scales, x.view(ranks, -1, x.shape[1])[0], 0)


def _arithmetic(x: Tensor) -> ModuleType:
    """Return the functions of ``wire`` for the device of ``x``."""
    if not x.is_cuda or importlib.util.find_spec("triton") is None:
        return wire
    from snip_megatron.quantization.kernels import quantize as kernels

    return kernels
