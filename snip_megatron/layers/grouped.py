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

from snip_megatron.layers.autograd import (
    LinearCall,
    autograd_gradient,
    check_backward,
    current_weights,
    gradient_keys,
    gradient_placeholder,
    main_grad_of,
    unreduced_gradient,
)
from snip_megatron.layers.context import LinearHandle, signs_of
from snip_megatron.numerics.products.backend import assemble, flatten, restored_operands
from snip_megatron.numerics.products.grouped import GroupLoop, GroupRows, group_rows
from snip_megatron.numerics.quantize.formats import SPECS, TILE
from snip_megatron.numerics.quantize.operands import OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import ROTATED, Rotation
from snip_megatron.precision import Format, Formats, Gemm


class GroupedCall(NamedTuple):
    """The arguments of one forward other than tensors. The backward uses the same object.

    Attributes:
        linear: the call of the first expert's linear, whose state, keys and signs serve all experts.
        handles: the linears of this rank's experts, in the order of the rows.
        on_wgrad_complete: see :func:`grouped_call`. If it is None, the weights are arguments of the autograd function.
        formats: formats of (fprop, dgrad, wgrad).
        versions: version counters of the weights, which every change of a weight increases.
        operands: the weights as the operands of fprop and of dgrad.
    """

    linear: LinearCall
    handles: Sequence[LinearHandle]
    weights: Sequence[Tensor]
    products: GroupLoop
    on_wgrad_complete: Callable[[], None] | None
    formats: Formats
    versions: list[int]
    operands: OperandPair = (None, None)

    def for_inputs(self, *inputs: Tensor) -> GroupedCall:
        """Return the call for ``inputs``. If none of them requires a gradient, autograd must see weights that do."""
        needs_autograd_wgrad = self.linear.has_backward and not any(x.requires_grad for x in inputs)
        return self._replace(on_wgrad_complete=None) if needs_autograd_wgrad else self

    @property
    def autograd_weights(self) -> Sequence[Tensor]:
        """The weights that autograd sees."""
        return self.weights if self.on_wgrad_complete is None else ()

    @property
    def input_spec(self) -> OperandSpec:
        """How X is quantised for fprop and wgrad."""
        fprop, _, wgrad = self.formats
        saved = wgrad if self.linear.has_backward else None
        return OperandSpec(fprop, saved, rotation=transform_of(self.linear.handle, wgrad))

    def check(self) -> None:
        """Raise SnipError if a backward cannot follow the forward."""
        check_backward(self.linear.handle.name, self.weights, self.versions)

    def wgrad(self, g: Any, x: Any) -> Sequence[Tensor | None]:
        """Run wgrad on its operands, and return what autograd gets for the weights that it sees."""
        handle, weights = self.linear.handle, self.weights
        main_grads = [main_grad_of(handle, weight) for weight in weights]
        out = [each for each in main_grads if each is not None]
        all_in_main_grad = len(out) == len(weights)
        grads = self.products.accumulate(g, x, out if all_in_main_grad else None)
        handle.state.backwards += 1
        if handle.delays and self.linear.trains:  # wgrad has run; what Megatron calls later tells DDP so
            handle.state.delayed.append(lambda: None)
        if self.on_wgrad_complete is not None:
            self.on_wgrad_complete()
            return ()
        shared = None  # one placeholder for all experts: one each would take the memory of all weights
        if all_in_main_grad and hasattr(weights[0], "grad_added_to_main_grad"):
            shared = gradient_placeholder(weights[0])
        return [autograd_gradient(*each, shared) for each in zip(weights, grads, main_grads, strict=True)]


def grouped_call(
    handles: Sequence[LinearHandle], weights: Sequence[Tensor], on_wgrad_complete: Callable[[], None] | None = None
) -> GroupedCall:
    """Return what a forward of the linear of all experts needs beside X, in the formats of the precision map.

    Args:
        handles: the linears of this rank's experts, in the order of the rows, which is theirs or its reverse.
        weights: their weights [N, K].
        on_wgrad_complete: callback that the backward calls when ∇W has been added to the ``main_grad`` of all weights.
            Autograd does not see the weights then. With many experts, its pass over them would take the host much
            longer than all GEMMs take. If it is None, autograd gets a gradient of every weight.
    """
    first = min(handles[0], handles[-1], key=lambda handle: handle.expert or 0)
    override = None if first.context.override is None else first.context.override(first)
    linear = LinearCall(first, has_backward=torch.is_grad_enabled(), override=override)
    versions = [weight._version for weight in weights]
    products = grouped_products(first) if override is None else linear.backend.grouped(*first.shard)
    call = GroupedCall(linear, handles, weights, products, on_wgrad_complete, linear.formats, versions)
    return call._replace(operands=_weight_operands(call))


def grouped_product(
    handles: Sequence[LinearHandle],
    weights: Sequence[Tensor],
    x: Tensor,
    splits: Sequence[int],
    on_wgrad_complete: Callable[[], None] | None = None,
) -> Tensor:
    """Return X_e·W_eᵀ of all experts, for X with ``splits`` rows of each. :func:`grouped_call` has other arguments."""
    pads, rows = grouped_products(handles[0]).pads and not isinstance(splits, GroupRows), None
    if pads and any(count % TILE for count in splits):
        splits = rows = group_rows(tuple(splits), x.device)
        x = pad(x, rows)
    call = grouped_call(handles, weights, on_wgrad_complete).for_inputs(x)
    y: Tensor = GroupedLinear.apply(x, splits, call, *call.autograd_weights)  # type: ignore[no-untyped-call]
    return y if rows is None else unpad(y, rows)


def grouped_products(handle: LinearHandle) -> GroupLoop:
    """Return what multiplies in the next forward. A probe records the rows of each expert, without padding."""
    backend = handle.context.backend
    if not handle.context.probing:
        return backend.grouped(*handle.shard)
    python = type(backend)  # C++ would record calls for every number of rows
    return GroupLoop(partial(python.quantize, backend), partial(python.multiply, backend))


class GroupedLinear(torch.autograd.Function):
    """Compute Y_e = X_e·W_eᵀ for every expert e, with X [rows, K], W_e [N, K] and Y [rows, N] in X's dtype.

    X is saved for the backward as the operand of wgrad. An expert's scales are those of this rank's shard of its
    matrices, also in formats with one scale for a whole tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Sequence[int], call: GroupedCall, *_: Tensor) -> Tensor:
        """Run fprop, and save the operand of wgrad for the backward."""
        ctx.call, ctx.splits = call._replace(operands=(None, call.operands[1])), splits
        probed = call.linear.handle.context.probing and call.linear.has_backward
        ctx.recorders = [each.state.recorder for each in call.handles] if probed else None
        rowwise, columnwise = call.products.quantize_rows(x, splits, call.input_spec)
        y = call.products.multiply(Gemm.FPROP, rowwise, call.operands[0], x.dtype)
        if call.linear.has_backward:
            tensors, ctx.structure = flatten(columnwise)
            ctx.save_for_backward(*tensors, *([x] if probed else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Run dgrad and wgrad."""
        call: GroupedCall = ctx.call
        g, splits = grad_outputs[0].contiguous(), ctx.splits
        call.check()
        *saved, x = ctx.saved_tensors if ctx.recorders is not None else (*ctx.saved_tensors, None)
        rowwise, columnwise = call.products.quantize_rows(g, splits, gradient_spec(call, g))
        _, w = call.operands if call.operands[1] is not None else _weight_operands(call, backward=True)
        d = call.products.multiply(Gemm.DGRAD, rowwise, w, g.dtype)
        grads = call.wgrad(columnwise, restored_operands(assemble((tuple(saved), ctx.structure))))
        if x is not None:
            _record(ctx.recorders, call, splits, x, g, d)
        return d, None, None, *grads


@torch.no_grad()
def _weight_operands(call: GroupedCall, *, backward: bool = False) -> OperandPair:
    """Return the weights of all experts by :func:`.autograd.current_weights`."""
    quantize, spec = partial(call.products.quantize_weights, call.weights), partial(OperandSpec, weight=True)
    return current_weights(call.linear, call.weights, call.formats[:2], quantize, spec, refresh=not backward)


def gradient_spec(call: GroupedCall, g: Tensor) -> OperandSpec:
    """Return how G [rows, N], or a tensor of as many rows, is quantised. It is called once in each backward."""
    _, dgrad, wgrad = call.formats
    keys = gradient_keys(call.linear, g, dgrad, wgrad)
    return OperandSpec(dgrad, wgrad, keys=keys, rotation=transform_of(call.linear.handle, wgrad))


def transform_of(handle: LinearHandle, wgrad: Format) -> Rotation | None:
    """Return the transform of an operand of wgrad, or None if its format has no Hadamard transform."""
    if wgrad not in ROTATED:
        return None
    signs = signs_of([handle], handle.context.seed, handle.context.step)[0] if SPECS[wgrad].random_signs else 0
    return Rotation(signs)


def _record(
    recorders: Sequence[Any], call: GroupedCall, splits: Sequence[int], x: Tensor, g: Tensor, d: Tensor
) -> None:
    """Pass the tensors of each expert to its recorder. All GEMMs of a probe run in bf16."""
    with torch.no_grad():
        summed = unreduced_gradient(call.linear.handle, d)
        rows = (torch.split(tensor, list(splits)) for tensor in (x, g, d, summed))
        for recorder, weight, of_x, of_g, of_d, of_summed in zip(recorders, call.weights, *rows, strict=True):
            if recorder is not None:
                recorder.on_backward(of_x, weight.detach(), of_g, of_d, of_summed)


# -- rows with padding and without, for autograd -----------------------------------------------------------------------
def pad(x: Tensor, rows: GroupRows) -> Tensor:
    """Return x [rows, ...] with zero rows after those of each expert."""
    return _Moved.apply(x, rows.pad, rows.unpad) if rows.moves else x  # type: ignore[no-untyped-call]


def unpad(x: Tensor, rows: GroupRows) -> Tensor:
    """Return the rows of x without the padding of :func:`pad`."""
    return _Moved.apply(x, rows.unpad, rows.pad) if rows.moves else x  # type: ignore[no-untyped-call]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Any, move_back: Any) -> Tensor:
        ctx.move_back = move_back
        moved: Tensor = move(x)
        return moved

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("rows of experts")
        return ctx.move_back(grad_outputs[0]), None, None
