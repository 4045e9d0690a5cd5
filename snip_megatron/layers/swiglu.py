"""SwiGLU between the two linears of an MLP, in one kernel with the quantisation of its result and of its gradient.

Unfused, SwiGLU writes X of fc2 in bf16, and fc2 reads it to quantise it; the backward writes G of fc1 in bf16, and fc1
reads it to quantise it. A format with one scale for the whole tensor reads it once more, for its amax. Each half is
fused where the formats of the map in force have a kernel: one that quantises, or one that finds the amax. Where they
have none, Megatron's own function runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snip_megatron.layers.autograd import LinearCall, PrequantizedTensor, check_backward, gradient_keys
from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.grouped import GroupedCall, gradient_spec, grouped_products
from snip_megatron.numerics.products.backend import assemble, flatten, matrix, restored_operands
from snip_megatron.numerics.products.grouped import Rows
from snip_megatron.numerics.quantize.operands import OperandPair, OperandSpec
from snip_megatron.precision import Format, FormatPair, Gemm


@dataclass(frozen=True)
class SwiGLU:
    """SwiGLU and its gradient as the training computes them without fusion."""

    forward: Callable[[Tensor], Tensor]  # y [T, 2K], gates first → [T, K]
    backward: Callable[[Tensor, Tensor], Tensor]  # (gradient of the result [T, K], y) → gradient of y [T, 2K]


def may_fuse(fc1: LinearHandle, fc2: LinearHandle) -> bool:
    """Return whether the next forward may be fused: not in probes, measuring passes and linears that are all bf16."""
    context = fc2.context
    return not (context.probing or context.override is not None or (fc1.is_stock and fc2.is_stock))


def fused_swiglu(y: Tensor, fc1: LinearHandle, fc2: LinearHandle, stock: SwiGLU) -> Tensor:
    """Return the input of fc2 [s, b, K] for the output of fc1.

    Nothing else may use ``y``, the output [s, b, 2K] of fc1. :func:`may_fuse` holds; ``stock`` runs where nothing is
    fused.
    """
    (fprop, _, wgrad), receiver = fc2.formats, _receiver(y, fc1)
    formats, shape = (fprop, wgrad if torch.is_grad_enabled() else None), (*y.shape[:-1], y.shape[-1] // 2)

    def result() -> Tensor:
        operands = None if fc2.is_stock else quantized_swiglu(matrix(y), fc2, formats)
        return stock.forward(matrix(y)).view(shape) if operands is None else PrequantizedTensor(operands, shape, y)

    def gradient(d: Tensor, y: Tensor) -> Tensor:
        if receiver is None:
            return stock.backward(matrix(d), matrix(y)).view(y.shape)
        return PrequantizedTensor(quantized_gradient(matrix(d), matrix(y), receiver), y.shape, y)

    return _Fused.apply(y, result, gradient)  # type: ignore[no-untyped-call,no-any-return]


class _Fused(torch.autograd.Function):
    """``result()``, whose gradient is ``gradient(d, y)``. Either may be quantised."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, result: Callable[[], Tensor], gradient: Any) -> Tensor:
        """Compute the result, which reads y."""
        ctx.save_for_backward(y)
        ctx.gradient = gradient
        return result()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of y."""
        check_backward("SwiGLU")
        return ctx.gradient(grad_outputs[0].contiguous(), *ctx.saved_tensors), None, None


def quantized_swiglu(y: Tensor, fc2: LinearHandle, formats: FormatPair) -> OperandPair | None:
    """Return SwiGLU of y [T, 2K] as the operands of fprop and wgrad of ``fc2``, or None if nothing is fused."""
    if fc2.context.backend.swiglu_kernel(y, formats) is None:
        return None
    return _operands(y, None, fc2, "x", OperandSpec(*formats))


def quantized_gradient(d: Tensor, y: Tensor, call: LinearCall) -> OperandPair:
    """Return the gradient of SwiGLU of y [T, 2K] as the operands of dgrad and wgrad of fc1, which made y by ``call``.

    The backend fuses it.
    """
    _, dgrad, wgrad = call.formats
    spec = OperandSpec(dgrad, wgrad, keys=gradient_keys(call, y, dgrad, wgrad))
    return _operands(y, d, call.handle, "g", spec)


def _operands(y: Tensor, d: Tensor | None, handle: LinearHandle, operand: str, spec: OperandSpec) -> OperandPair:
    """Return SwiGLU of y, or its gradient from ``d``, as X or G of a linear.

    If its amax is that of a shard, this is a collective of the tensor parallel group.
    """
    backend = handle.context.backend
    if backend.swiglu_kernel(y, spec.formats) == "quantize":
        return backend.swiglu(y, d, spec)
    x, amax = backend.swiglu(y, d, None)
    return backend.quantize(x, spec._replace(amax=handle.unsharded_amax(operand, amax)))


def _receiver(y: Tensor, fc1: LinearHandle) -> LinearCall | None:
    """Return the call of fc1 that made y, if its backward takes a quantised gradient."""
    node: Any = y.grad_fn
    call = getattr(node, "call", None)
    if not isinstance(call, LinearCall) or call.handle is not fc1 or not call.trains or node.has_bias:
        return None
    return call if fc1.context.backend.swiglu_kernel(matrix(y.detach()), call.formats[1:]) else None


# -- experts -----------------------------------------------------------------------------------------------------------
def may_fuse_experts(fc1: LinearHandle, fc2: LinearHandle) -> bool:
    """Return whether :func:`fused_experts` may run the MLP of two linears of experts in the next forward."""
    if not may_fuse(fc1, fc2) or fc1.is_stock or fc2.is_stock or fc1.context.fsdp_sharded:
        return False
    fprop, _, wgrad = fc2.formats
    return grouped_products(fc2).fuses_swiglu((fprop, wgrad))


def takes_device_rows(*calls: GroupedCall) -> bool:
    """Return whether :func:`fused_experts` takes rows whose numbers only the device knows."""
    return all(call.products.takes_device_rows(call.formats) for call in calls)


def fused_experts(x: Tensor, probs: Tensor, rows: Rows, fc1: GroupedCall, fc2: GroupedCall) -> Tensor:
    """Return the MLP of all experts: fc2 of SwiGLU of fc1, times the probability of each row.

    Args:
        x: [rows, hidden], without padding.
        probs: [rows], or [rows, 1], the probabilities of the router.
        rows: those of the experts.
        fc1, fc2: the two linears. :func:`may_fuse_experts` holds.
    """
    fc1, fc2 = (each.for_inputs(x, probs) for each in (fc1, fc2))
    return _FusedExperts.apply(x, probs, rows, fc1, fc2, *fc1.autograd_weights, *fc2.autograd_weights)  # type: ignore[no-untyped-call,no-any-return]


class _FusedExperts(torch.autograd.Function):
    """One function for what would be three: the host bounds experts of a few thousand rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, rows: Rows, fc1: GroupedCall, fc2: GroupedCall, *_: Tensor
    ) -> Tensor:
        """Compute the result, and save Y of fc1 and the operands of both wgrads."""
        ctx.calls, ctx.rows, ctx.like_probs = (fc1, fc2), rows, (probs.shape, probs.dtype)
        rowwise, of_x = fc1.products.quantize_unpadded(x, rows, fc1.input_spec)
        y = fc1.products.multiply(Gemm.FPROP, rowwise, fc1.operands[0], x.dtype)
        probs = rows.pad(probs.float().view(-1))
        rowwise, of_hidden = fc2.products.swiglu(y, probs, rows, fc2.input_spec)
        if fc1.linear.has_backward:
            tensors, ctx.structure = flatten((of_x, of_hidden))
            ctx.save_for_backward(y, probs, *tensors)
        return rows.unpad(fc2.products.multiply(Gemm.FPROP, rowwise, fc2.operands[0], x.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Run dgrad and wgrad of fc2, the gradient of SwiGLU, and dgrad and wgrad of fc1."""
        fc1, fc2 = ctx.calls
        for call in ctx.calls:
            call.check()
        y, probs, *tensors = ctx.saved_tensors
        of_x, of_hidden = restored_operands(assemble((tuple(tensors), ctx.structure)))
        g, rows = grad_outputs[0].contiguous(), ctx.rows
        rowwise, columnwise = fc2.products.quantize_unpadded(g, rows, gradient_spec(fc2, g))
        d = fc2.products.multiply(Gemm.DGRAD, rowwise, fc2.operands[1], g.dtype)
        fc2_grads = fc2.wgrad(columnwise, of_hidden)
        spec, fuses = gradient_spec(fc1, y), fc1.products.fuses_swiglu(fc1.formats[1:])
        (rowwise, columnwise), of_probs = fc1.products.swiglu_gradient(
            d, y, probs, rows, spec if fuses else _UNQUANTIZED
        )
        if not fuses:
            rowwise, columnwise = fc1.products.quantize_rows(rowwise.matrix, rows, spec)
        d = rows.unpad(fc1.products.multiply(Gemm.DGRAD, rowwise, fc1.operands[1], g.dtype))
        shape, dtype = ctx.like_probs
        of_probs = rows.unpad(of_probs).view(shape).to(dtype)
        return d, of_probs, None, None, None, *fc1.wgrad(columnwise, of_x), *fc2_grads


_UNQUANTIZED = OperandSpec(Format.BF16, None)
