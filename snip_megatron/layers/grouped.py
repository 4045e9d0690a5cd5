"""The autograd function of one linear of all experts of a layer: three grouped GEMMs, each in its own format.

The rows of X [rows, K] are ordered by expert. All experts of a layer have the formats of one choice. Nothing is
communicated here: the token dispatcher exchanges tokens, and sums what the tensor parallel ranks of an expert share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.gemm.grouped import GroupLoop
from snip_megatron.gemm.operands import assemble, flatten
from snip_megatron.layers.autograd import (
    LinearCall,
    gradient_keys,
    main_grad_of,
    nothing,
    passed_on,
    placeholder_of,
    unreduced_gradient,
)
from snip_megatron.layers.context import LinearHandle, signs_of
from snip_megatron.layers.override import output_error, perturbed, report_error
from snip_megatron.layers.padding import PaddedSplits
from snip_megatron.layers.prequantized import PrequantizedTensor
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization.formats import SPECS
from snip_megatron.quantization.hadamard import ROTATED, Rotation
from snip_megatron.quantization.operands import OperandPair, OperandSpec


class GroupedCall(NamedTuple):
    """The arguments of one forward other than tensors. The backward uses the same object.

    Attributes:
        linear: the call of the first expert's linear, whose state, keys and signs serve all experts.
        handles: the linears of this rank's experts, in the order of the rows.
        weights: their weights [N, K].
        splits: number of rows of each expert.
        products: the grouped products of the backend.
        told: see :func:`grouped_product`. None: the weights are arguments of the autograd function.
    """

    linear: LinearCall
    handles: Sequence[LinearHandle]
    weights: Sequence[Tensor]
    splits: Sequence[int]
    products: GroupLoop
    told: Callable[[], None] | None


def grouped_product(
    handles: Sequence[LinearHandle],
    weights: Sequence[Tensor],
    x: Tensor,
    splits: Sequence[int],
    told: Callable[[], None] | None = None,
) -> Tensor:
    """Return X_e·W_eᵀ of all experts in the formats of the precision map.

    Args:
        handles: the linears of this rank's experts, in the order of the rows, which is theirs or its reverse.
        weights: their weights [N, K].
        x: X [rows, K].
        splits: number of rows of each expert.
        told: called in the backward, when ∇W has been added to the ``main_grad`` of all weights. Autograd does not see
            the weights then, which takes the host much longer than all GEMMs do where experts are many. None: autograd
            gets a gradient of every weight.
    """
    first = min(handles[0], handles[-1], key=lambda handle: handle.expert or 0)
    products = grouped_products(first)
    rows = None
    if not isinstance(splits, PaddedSplits) and any(count % products.row_multiple for count in splits):
        rows = PaddedSplits(splits, products.row_multiple, backwards=False, device=x.device)
        x, splits = rows.pad(x), rows
    override = first.context.override
    linear = LinearCall(
        first, has_backward=torch.is_grad_enabled(), override=None if override is None else override(first)
    )
    told = told if x.requires_grad or not linear.has_backward else None  # otherwise there would be no backward
    call = GroupedCall(linear, handles, weights, tuple(splits), products, told)
    y: Tensor = GroupedLinear.apply(x, call, *([] if told is not None else weights))  # type: ignore[no-untyped-call]
    return y if rows is None else rows.unpad(y)


def grouped_products(handle: LinearHandle) -> GroupLoop:
    """Return what multiplies in the next forward. A probe records the rows of each expert, without padding."""
    backend = handle.context.backend
    return GroupLoop(backend.quantize, backend.multiply) if handle.context.probing else backend.grouped(*handle.shard)


class GroupedLinear(torch.autograd.Function):
    """Compute Y_e = X_e·W_eᵀ for every expert e, with X [rows, K], W_e [N, K] and Y [rows, N] in X's dtype.

    X is saved for the backward as the operand of wgrad. An expert's scales are those of this rank's shard of its
    matrices, also in formats with one scale for a whole tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: GroupedCall, *passed: Tensor) -> Tensor:
        """Run fprop, and save the operand of wgrad and the formats of the call for the backward."""
        handle, weights, products = call.linear.handle, call.weights, call.products
        fprop, dgrad, wgrad = ctx.formats = call.linear.formats
        ctx.call, ctx.versions = call, [weight._version for weight in weights]
        probed = handle.context.probing and call.linear.has_backward
        ctx.recorders = [each.state.recorder for each in call.handles] if probed else None
        if isinstance(x, PrequantizedTensor):
            rowwise, columnwise = x.operands
        else:
            spec = OperandSpec(fprop, wgrad if call.linear.has_backward else None, rotation=_rotation(handle, wgrad))
            rowwise, columnwise = products.quantize_rows(x, call.splits, spec)
        # Weights that are gathered for every pass become the operands of that pass alone.
        w, ctx.w = _weight_operands(call, fprop, None if handle.context.gathers else dgrad)
        y = products.multiply(Gemm.FPROP, rowwise, w, x.dtype)
        override = call.linear.override
        if override is not None:
            y = _by_expert(call, lambda a, b, own: perturbed(override, Gemm.FPROP, a, b.t(), own), x, weights, y)
            if override.compare is not None:
                error = partial(output_error, override, handle, handle.context.backend)
                ctx.error = _by_expert(call, error, x, weights, y)
        if call.linear.has_backward:
            tensors, ctx.rest = flatten(columnwise)
            ctx.save_for_backward(*tensors, *([x] if probed else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Run dgrad and wgrad."""
        call: GroupedCall = ctx.call
        handle, weights, g = call.linear.handle, call.weights, grad_outputs[0]
        if torch.is_grad_enabled():
            raise SnipError(f"{handle.name}: create_graph=True is not supported, because rounding has no derivative")
        if [weight._version for weight in weights] != ctx.versions:
            raise SnipError(f"{handle.name}: a weight was changed between the forward and the backward")
        products = call.products
        _, dgrad, wgrad = ctx.formats
        *saved, x = ctx.saved_tensors if ctx.recorders is not None else (*ctx.saved_tensors, None)
        if isinstance(g, PrequantizedTensor):
            rowwise, columnwise = g.operands
        else:
            rowwise, columnwise = products.quantize_rows(
                g.contiguous(), call.splits, gradient_spec(call, g, dgrad, wgrad)
            )
        w = _weight_operands(call, None, dgrad)[1] if ctx.w is None else ctx.w
        d = products.multiply(Gemm.DGRAD, rowwise, w, g.dtype)
        override = call.linear.override
        if override is not None:
            d = _by_expert(call, partial(perturbed, override, Gemm.DGRAD), g, weights, d)
            report_error(override, g, getattr(ctx, "error", None))
        main_grads = [main_grad_of(handle, weight) for weight in weights]
        out = [each for each in main_grads if each is not None]
        x_columnwise = assemble((tuple(saved), ctx.rest))
        found = products.accumulate(columnwise, x_columnwise, out if len(out) == len(weights) else None)
        handle.state.backwards += 1
        if handle.delays and call.linear.trains:  # wgrad has run; what Megatron calls later tells DDP so
            handle.state.delayed.append(nothing)
        if x is not None:
            _record(ctx.recorders, call, x, weights, g, d)
        if call.told is not None:
            call.told()
            return d, None
        shared = None  # by all experts: placeholders of their own would take the memory of all weights
        if len(out) == len(weights) and hasattr(weights[0], "grad_added_to_main_grad"):
            shared = placeholder_of(weights[0])
        return d, None, *(passed_on(*each, shared) for each in zip(weights, found, main_grads, strict=True))


def _by_expert(
    call: GroupedCall, function: Callable[..., Tensor | None], rows: Tensor, weights: Sequence[Tensor], out: Tensor
) -> Tensor:
    """Return ``function(rows, weight, out)`` of every expert, which an Override asks for, as one tensor."""
    of_rows, of_out = (torch.split(each, list(call.splits)) for each in (rows, out))
    return torch.cat([function(*each) for each in zip(of_rows, weights, of_out, strict=True)])  # type: ignore[misc]


def _weight_operands(call: GroupedCall, fprop: Format | None, dgrad: Format | None) -> OperandPair:
    """Return the weights as the operands of fprop and of dgrad, quantised if one of them has changed."""
    handle, weights = call.linear.handle, call.weights
    backend, spec = handle.context.backend, OperandSpec(fprop, dgrad, weight=True)
    if fprop is None or dgrad is None:
        return call.products.quantize_weights(weights, spec)
    return handle.state.weights.get(
        backend, weights, (fprop, dgrad), lambda: call.products.quantize_weights(weights, spec)
    )


def gradient_spec(call: GroupedCall, g: Tensor, dgrad: Format, wgrad: Format) -> OperandSpec:
    """Return how G [rows, N], or a tensor of as many rows, is quantised. It is called once in each backward."""
    keys = gradient_keys(call.linear, g, dgrad, wgrad)
    return OperandSpec(dgrad, wgrad, keys=keys, rotation=_rotation(call.linear.handle, wgrad))


def _rotation(handle: LinearHandle, wgrad: Format) -> Rotation | None:
    """Return how an operand of wgrad is transformed; None if its format has no Hadamard transform."""
    if wgrad not in ROTATED:
        return None
    signs = signs_of([handle], handle.context.seed, handle.context.step)[0] if SPECS[wgrad].random_signs else 0
    return Rotation(signs)


def _record(
    recorders: Sequence[Any], call: GroupedCall, x: Tensor, weights: Sequence[Tensor], g: Tensor, d: Tensor
) -> None:
    """Pass the tensors of each expert to its recorder. All GEMMs of a probe run in bf16."""
    with torch.no_grad():
        whole = unreduced_gradient(call.linear.handle, d)
        rows = (torch.split(tensor, list(call.splits)) for tensor in (x, g, d, whole))
        for recorder, weight, of_x, of_g, of_d, of_whole in zip(recorders, weights, *rows, strict=True):
            if recorder is not None:
                recorder.on_backward(of_x, weight.detach(), of_g, of_d, of_whole)
