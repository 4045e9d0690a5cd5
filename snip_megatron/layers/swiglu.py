"""SwiGLU between the two linears of an MLP, in one kernel with the quantisation of its result and of its gradient.

Unfused, SwiGLU writes X of fc2 in bf16, and fc2 reads it to quantise it; the backward writes G of fc1 in bf16, and fc1
reads it to quantise it. A format with one scale for the whole tensor reads it once more, for its amax. Each half is
fused where the formats of the map in force have a kernel: one that quantises, or one that finds the amax. Where they
have none, Megatron's own function runs, so that the numbers of a training do not depend on what is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from snip_megatron.gemm.backend import Formats, GemmBackend, Sides, matrix
from snip_megatron.layers.autograd import LinearCall, gradient_keys
from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.handover import hand_over, nothing
from snip_megatron.precision import Format


@dataclass(frozen=True)
class SwiGLU:
    """SwiGLU and its gradient as the training computes them without fusion.

    Attributes:
        forward: y [T, 2K], gates first → [T, K].
        backward: (gradient of the result [T, K], y) → gradient of y [T, 2K].
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def may_fuse(fc1: LinearHandle, fc2: LinearHandle) -> bool:
    """Return whether the next forward may be fused: not in probes, measuring passes and linears that are all bf16."""
    context = fc2.context
    return not (context.probing or context.forcing is not None or (fc1.is_stock and fc2.is_stock))


def fused_swiglu(y: torch.Tensor, fc1: LinearHandle, fc2: LinearHandle, stock: SwiGLU) -> torch.Tensor:
    """Return the input of fc2 [s, b, K] for the output of fc1.

    Args:
        y: output of fc1 [s, b, 2K]. Nothing else may use it.
        fc1, fc2: the linears. :func:`may_fuse` holds.
        stock: what runs where nothing is fused.
    """
    fprop, _, wgrad = fc2.formats
    formats = (fprop, wgrad if torch.is_grad_enabled() else None)
    sides = None if fc2.is_stock else quantised_swiglu(matrix(y.detach()), fc2, formats)
    x: torch.Tensor = _FusedSwiGLU.apply(y, stock, sides is not None, _receiver(y, fc1))  # type: ignore[no-untyped-call]
    return x if sides is None else hand_over(x, sides)


class _FusedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, stock: SwiGLU, quantised: bool, receiver: Any) -> torch.Tensor:
        """Return the result, or a tensor without numbers if it is quantised already."""
        ctx.save_for_backward(y)
        ctx.stock, ctx.receiver = stock, receiver
        shape = (*y.shape[:-1], y.shape[-1] // 2)
        return nothing(shape, y) if quantised else stock.forward(matrix(y)).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Hand the quantised gradient to fc1, or compute it as the training does without fusion."""
        (y,) = ctx.saved_tensors
        d, rows = matrix(grad_outputs[0]).contiguous(), matrix(y)
        if ctx.receiver is not None:
            call: LinearCall = ctx.receiver.call
            ctx.receiver.given = quantised_gradient(d, rows, call, *ctx.receiver.formats[1:])
            return nothing(y.shape, y), None, None, None
        return ctx.stock.backward(d, rows).view(y.shape), None, None, None


def fuses(backend: GemmBackend, y: torch.Tensor, formats: Formats) -> bool:
    """Return whether the backend has kernels for SwiGLU of y [T, 2K], or for its gradient, in two formats."""
    return backend.quantizes_swiglu(y, formats) or backend.finds_amax_of_swiglu(y, formats)


def quantised_swiglu(y: torch.Tensor, fc2: LinearHandle, formats: Formats) -> Sides | None:
    """Return SwiGLU of y [T, 2K] as the operands of fprop and wgrad of ``fc2``; None if nothing is fused.

    If its amax is that of a shard, this is a collective of the tensor parallel group.
    """
    backend = fc2.context.backend
    if backend.quantizes_swiglu(y, formats):
        return backend.quantize_swiglu(y, *formats)
    if not backend.finds_amax_of_swiglu(y, formats):
        return None
    x, amax = backend.swiglu_with_amax(y)
    return backend.quantize_input(x, *formats, amax=fc2.unsharded_amax("x", amax))


def quantised_gradient(d: torch.Tensor, y: torch.Tensor, call: LinearCall, dgrad: Format, wgrad: Format) -> Sides:
    """Return the gradient of SwiGLU of y [T, 2K] as the operands of dgrad and wgrad of fc1, which made y by ``call``.

    :func:`fuses` holds. If its amax is that of a shard, this is a collective of the tensor parallel group.
    """
    backend, keys = call.backend, gradient_keys(call, dgrad, wgrad)
    if backend.quantizes_swiglu(y, (dgrad, wgrad)):
        return backend.quantize_swiglu_gradient(d, y, dgrad, wgrad, keys)
    g, amax = backend.swiglu_gradient_with_amax(d, y)
    return backend.quantize_gradient(g, dgrad, wgrad, keys, amax=call.handle.unsharded_amax("g", amax))


def _receiver(y: torch.Tensor, fc1: LinearHandle) -> Any:
    """Return the graph node of fc1 that takes a quantised gradient; None if it does not."""
    node: Any = y.grad_fn
    call = getattr(node, "call", None)
    if not isinstance(call, LinearCall) or call.handle is not fc1 or not call.trains or node.has_bias:
        return None
    _, dgrad, wgrad = node.formats
    return node if fuses(call.backend, matrix(y.detach()), (dgrad, wgrad)) else None
