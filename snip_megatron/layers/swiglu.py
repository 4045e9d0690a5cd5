"""SwiGLU between the two linears of an MLP, in one kernel with the quantisation of its result and of its gradient.

Unfused, SwiGLU writes X of fc2 in bf16, and fc2 reads it to quantise it; the backward writes G of fc1 in bf16, and fc1
reads it to quantise it. A format with one scale for the whole tensor reads it once more, for its amax. Each half is
fused where the formats of the map in force have a kernel: one that quantises, or one that finds the amax. Where they
have none, Megatron's own function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snip_megatron.gemm.backend import Formats, matrix
from snip_megatron.layers.autograd import LinearCall, gradient_keys
from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.grouped import GroupedCall, gradient_spec, grouped_products
from snip_megatron.layers.padding import refuse_second_derivatives
from snip_megatron.layers.prequantized import PrequantizedTensor
from snip_megatron.precision import Format
from snip_megatron.quantization.operands import OperandPair, OperandSpec


@dataclass(frozen=True)
class SwiGLU:
    """SwiGLU and its gradient as the training computes them without fusion.

    Attributes:
        forward: y [T, 2K], gates first → [T, K].
        backward: (gradient of the result [T, K], y) → gradient of y [T, 2K].
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def may_fuse(fc1: LinearHandle, fc2: LinearHandle) -> bool:
    """Return whether the next forward may be fused: not in probes, measuring passes and linears that are all bf16."""
    context = fc2.context
    return not (context.probing or context.override is not None or (fc1.is_stock and fc2.is_stock))


def fused_swiglu(y: Tensor, fc1: LinearHandle, fc2: LinearHandle, stock: SwiGLU) -> Tensor:
    """Return the input of fc2 [s, b, K] for the output of fc1.

    Args:
        y: output of fc1 [s, b, 2K]. Nothing else may use it.
        fc1, fc2: the linears. :func:`may_fuse` holds.
        stock: what runs where nothing is fused.
    """
    (fprop, _, wgrad), receiver = fc2.formats, _receiver(y, fc1)
    formats, shape = (fprop, wgrad if torch.is_grad_enabled() else None), (*y.shape[:-1], y.shape[-1] // 2)

    def result() -> Tensor:
        operands = None if fc2.is_stock else quantized_swiglu(matrix(y), fc2, formats)
        return stock.forward(matrix(y)).view(shape) if operands is None else PrequantizedTensor(operands, shape, y)

    def gradient(d: Tensor, y: Tensor, _: None) -> tuple[Tensor, None]:
        if receiver is None:
            return stock.backward(matrix(d), matrix(y)).view(y.shape), None
        return PrequantizedTensor(quantized_gradient(matrix(d), matrix(y), receiver), y.shape, y), None

    return _Fused.apply(y, None, result, gradient)  # type: ignore[no-untyped-call,no-any-return]


class _Fused(torch.autograd.Function):
    """``result()``, whose gradient is ``gradient(d, y, probs)``. Either may be quantised."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, probs: Tensor | None, result: Callable[[], Tensor], gradient: Any) -> Tensor:
        """Compute the result, which reads y and ``probs``."""
        ctx.save_for_backward(y, probs)
        ctx.gradient = gradient
        return result()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of y and of ``probs``."""
        refuse_second_derivatives()
        return (*ctx.gradient(grad_outputs[0].contiguous(), *ctx.saved_tensors), None, None)


def quantized_swiglu(y: Tensor, fc2: LinearHandle, formats: Formats) -> OperandPair | None:
    """Return SwiGLU of y [T, 2K] as the operands of fprop and wgrad of ``fc2``; None if nothing is fused.

    If its amax is that of a shard, this is a collective of the tensor parallel group.
    """
    backend = fc2.context.backend
    way = backend.swiglu_kernel(y, formats)
    if way is None:
        return None
    if way == "quantize":
        return backend.swiglu(y, None, OperandSpec(*formats))
    x, amax = backend.swiglu(y, None, None)
    return backend.quantize(x, OperandSpec(*formats, amax=fc2.unsharded_amax("x", amax)))


def quantized_gradient(d: Tensor, y: Tensor, call: LinearCall) -> OperandPair:
    """Return the gradient of SwiGLU of y [T, 2K] as the operands of dgrad and wgrad of fc1, which made y by ``call``.

    The backend fuses it. If its amax is that of a shard, this is a collective of the tensor parallel group.
    """
    handle, (_, dgrad, wgrad) = call.handle, call.formats
    backend, spec = handle.context.backend, OperandSpec(dgrad, wgrad, keys=gradient_keys(call, y, dgrad, wgrad))
    if backend.swiglu_kernel(y, (dgrad, wgrad)) == "quantize":
        return backend.swiglu(y, d, spec)
    g, amax = backend.swiglu(y, d, None)
    return backend.quantize(g, spec._replace(amax=handle.unsharded_amax("g", amax)))


def _receiver(y: Tensor, fc1: LinearHandle) -> LinearCall | None:
    """Return the call of fc1 that made y, if its backward takes a quantised gradient."""
    node: Any = y.grad_fn
    call = getattr(node, "call", None)
    if not isinstance(call, LinearCall) or call.handle is not fc1 or not call.trains or node.has_bias:
        return None
    return call if fc1.context.backend.swiglu_kernel(matrix(y.detach()), call.formats[1:]) else None


# -- experts -----------------------------------------------------------------------------------------------------------
def may_fuse_experts(fc1: LinearHandle, fc2: LinearHandle) -> bool:
    """Return whether :func:`weighted_swiglu` may run between two linears of experts in the next forward."""
    if not may_fuse(fc1, fc2) or fc2.is_stock:
        return False
    fprop, _, wgrad = fc2.formats
    return grouped_products(fc2).fuses_swiglu((fprop, wgrad))


def weighted_swiglu(y: Tensor, probs: Tensor, splits: Sequence[int], fc1: LinearHandle, fc2: LinearHandle) -> Tensor:
    """Return the input of fc2 of all experts [rows, K], quantised: SwiGLU times the probability of each row.

    Args:
        y: output of fc1 [rows, 2K], with the rows that grouped products need. Nothing else may use it.
        probs: [rows], the probabilities of the router.
        splits: number of rows of each expert.
        fc1, fc2: the linears of the first expert. :func:`may_fuse_experts` holds.
    """
    fprop, _, wgrad = fc2.formats
    spec, products = OperandSpec(fprop, wgrad if torch.is_grad_enabled() else None), grouped_products(fc2)
    node: Any = y.grad_fn
    call = getattr(node, "call", None)
    receiver = None
    if isinstance(call, GroupedCall) and call.linear.handle is fc1 and call.products.fuses_swiglu(node.formats[1:]):
        receiver = call

    def result() -> Tensor:
        return PrequantizedTensor(products.swiglu(y, probs.float(), splits, spec), (y.shape[0], y.shape[1] // 2), y)

    def gradient(d: Tensor, y: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        how = _UNQUANTIZED if receiver is None else gradient_spec(receiver, y, *receiver.linear.formats[1:])
        operands, of_probs = products.swiglu_gradient(d, y, probs.float(), splits, how)
        g = operands[0].matrix if receiver is None else PrequantizedTensor(operands, y.shape, y)
        return g, of_probs.view(probs.shape).to(probs.dtype)

    return _Fused.apply(y, probs, result, gradient)  # type: ignore[no-untyped-call,no-any-return]


_UNQUANTIZED = OperandSpec(Format.BF16, None)
