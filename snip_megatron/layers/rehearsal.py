"""Runs every kind of GEMM on tensors of its own before training.

Kernels are compiled and GEMM plans are made at first use. This is the first use, so that no training step waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from snip_megatron.gemm.operands import GradientKeys
from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import ALL_BF16, LinearHandle
from snip_megatron.layers.device_step import DeviceStep
from snip_megatron.layers.exchange import packs_gradient
from snip_megatron.layers.reductions import rehearse_quantised
from snip_megatron.layers.swiglu import fuses, quantised_gradient, quantised_swiglu
from snip_megatron.precision import Format

Formats = tuple[Format, Format, Format]


class _Holder(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@dataclass(frozen=True)
class StandIn:
    """A linear with the shapes of one of the model's, which runs on this rank alone.

    Attributes:
        handle: handle with a weight and a gradient of its own, both zero.
        x: X [tokens, K local], zero.
        g: G [tokens, N local], zero.
        whole_x: whether shards of X are gathered, as under sequence parallelism.
    """

    handle: LinearHandle
    x: torch.Tensor
    g: torch.Tensor
    whole_x: bool


_IDENTITY = (
    "id", "parallel", "n", "k", "stage", "tp_rank", "tp_size", "out_features", "in_features", "context", "expert",
    "beside_swiglu",
)  # fmt: skip


def stand_in(handle: LinearHandle, tokens: int, *, whole_x: bool, graphed: bool = False) -> StandIn:
    """Return a stand-in for ``handle``.

    Args:
        handle: the linear of the model.
        tokens: number of rows of X and G.
        whole_x: see :class:`StandIn`.
        graphed: whether the stand-in reads keys and weights from the device, as linears in CUDA graphs do.
    """
    like = handle.weight
    weight = torch.nn.Parameter(torch.zeros_like(like))
    weight.main_grad = torch.zeros(like.shape, dtype=torch.float32, device=like.device)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    # Only these fields are copied. The weight cache, the recorder and the other fields belong to training.
    kept = {name: getattr(handle, name) for name in _IDENTITY}
    copy = LinearHandle(**kept, module=_Holder(weight))
    if graphed:
        DeviceStep([copy], [0], weight.device)
    n, k = like.shape
    return StandIn(copy, like.new_zeros(tokens, k).detach(), like.new_zeros(tokens, n).detach(), whole_x)


def rehearse_gemms(linear: StandIn, formats: Iterable[Formats]) -> None:
    """Run forward and backward in each of ``formats``, and a forward alone, as validation and recomputation do."""
    handle, backend = linear.handle, linear.handle.context.backend
    call = LinearCall(handle, backend, sequence_parallel=False, allreduce_dgrad=False, tp_group=None)
    for chosen in formats:
        if chosen == ALL_BF16:
            continue  # runs Megatron's own linear
        handle.formats = chosen
        handle.weights.clear()
        x = linear.x.detach().requires_grad_()
        y = QuantizedLinear.apply(x, handle.weight, None, call)  # type: ignore[no-untyped-call]
        y.backward(linear.g)
        with torch.no_grad():
            alone = call._replace(has_backward=False)
            QuantizedLinear.apply(linear.x, handle.weight, None, alone)  # type: ignore[no-untyped-call]
        if linear.whole_x:
            rotation = handle.rotation("x", linear.x, chosen[2], on_device=True)
            backend.quantize_input(linear.x, None, chosen[2], rotation=rotation)
        _rehearse_gathers(linear)
        if handle.beside_swiglu:
            _rehearse_swiglu(linear, call)
        _rehearse_reductions(linear)
    handle.formats = ALL_BF16


def _rehearse_gathers(linear: StandIn) -> None:
    """Quantise, pack and open shards of the operands that the linear gathers (``--snip-communication gather``)."""
    handle, backend = linear.handle, linear.handle.context.backend
    fprop, dgrad, wgrad = handle.formats
    if not handle.context.packs or handle.expert is not None:
        return
    if linear.whole_x:
        shard = linear.x[: len(linear.x) // handle.tp_size]
        formats, sides = (fprop, wgrad), backend.quantize_input(shard, fprop, wgrad)
    elif handle.parallel == "row" and packs_gradient(handle, linear.x):
        shard = linear.g[: len(linear.g) // handle.tp_size]
        keys = GradientKeys(0, 0, handle.out_features, first_row=len(shard))
        formats, sides = (dgrad, wgrad), backend.quantize_gradient(shard, dgrad, wgrad, keys)
    else:
        return
    for side, fmt, axis in zip(sides, formats, (1, 0), strict=True):
        parcel = backend.pack(side, fmt, axis)
        parcel.opened(tuple(torch.stack([t] * handle.tp_size) for t in parcel.tensors))


def _rehearse_swiglu(linear: StandIn, call: LinearCall) -> None:
    """Quantise SwiGLU as the second linear of an MLP takes it, or its gradient as the first one does."""
    handle, backend = linear.handle, linear.handle.context.backend
    fprop, dgrad, wgrad = handle.formats
    if handle.parallel == "column":
        y, d = linear.g, linear.g.new_zeros(len(linear.g), linear.g.shape[1] // 2)
        if fuses(backend, y, (dgrad, wgrad)):
            quantised_gradient(d, y, call, dgrad, wgrad)
        return
    y = linear.x.new_zeros(len(linear.x), 2 * linear.x.shape[1])
    for kept in (wgrad, None):  # in training; in validation and recomputation
        quantised_swiglu(y, handle, (fprop, kept))


def _rehearse_reductions(linear: StandIn) -> None:
    """Quantise and add partial sums of Y or ∂L/∂X (``--snip-communication all``)."""
    handle = linear.handle
    fprop, dgrad, _ = handle.formats
    fmt, partial = (fprop, linear.g) if handle.parallel == "row" else (dgrad, linear.x)
    shards = handle.tp_size > 1 and handle.expert is None
    if shards and handle.reduces(fmt) and len(partial) % handle.tp_size == 0:
        rehearse_quantised(partial, handle.tp_size)


def covering(options: tuple[Sequence[Format], Sequence[Format], Sequence[Format]], *, alike: bool) -> list[Formats]:
    """Return few choices of three formats that contain every pair of formats of every two GEMMs.

    Each of X, W and G is quantised for two GEMMs at once, and kernels are compiled for each pair of formats.

    Args:
        options: possible formats of fprop, dgrad and wgrad.
        alike: whether the three GEMMs of a linear always have the same format.
    """
    chosen = [(a, b, c) for a, b, c in itertools.product(*options) if not alike or a is b is c]
    found: list[Formats] = []
    seen: set[tuple[int, Format, Format]] = set()
    # Greedy: take the choice with the most missing pairs. With two formats per GEMM, this takes four of eight choices.
    while chosen:
        best = max(chosen, key=lambda formats: len(_pairs(formats) - seen))
        if _pairs(best) <= seen:
            break
        found.append(best)
        seen |= _pairs(best)
    return found


def _pairs(formats: Formats) -> set[tuple[int, Format, Format]]:
    fprop, dgrad, wgrad = formats
    return {(0, fprop, wgrad), (1, fprop, dgrad), (2, dgrad, wgrad)}  # of X, of W, of G
