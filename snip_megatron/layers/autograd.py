"""The autograd function of a quantised linear: three GEMMs, each in its own format, and Megatron's communication.

It does what Megatron's own function does around the GEMMs: the gather of a sequence parallel input, the reduction of
the input gradient, overlapped with wgrad, and the accumulation into ``main_grad``. It does not import Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers.context import GRADIENT_GEMMS, LinearHandle, Override
from snip_megatron.numerics.products.backend import (
    FlatOperand,
    GemmBackend,
    GemmOperand,
    assemble,
    flatten,
    matrix,
    restored,
    unflattened,
)
from snip_megatron.numerics.quantize import derive_seeds
from snip_megatron.numerics.quantize.formats import STOCHASTIC
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.precision import ALL_BF16, Format, Formats, Gemm
from snip_megatron.precision.errors import SnipError


class LinearCall(NamedTuple):
    """The arguments of one forward other than tensors. The backward uses the same object.

    Every forward builds one, and a tuple is faster to build than a dataclass.
    """

    handle: LinearHandle
    # whether the input is this rank's token shard. It is then gathered, and its gradient is reduce-scattered
    sequence_parallel: bool = False
    allreduce_dgrad: bool = False  # whether the input is replicated. Its gradient is then all-reduced
    tp_group: dist.ProcessGroup | None = None  # the tensor parallel group, which communication needs
    has_backward: bool = True  # whether a backward may follow. X is quantised for wgrad only then
    override: Override | None = None  # the request of a measuring pass. None during training and in probes
    # whether the output is reduce-scattered. The output gradient is then this rank's token shard and is gathered
    reduce_scatter: bool = False

    @property
    def formats(self) -> Formats:
        """Formats of (fprop, dgrad, wgrad) in this microbatch."""
        if self.override is not None:
            return self.override.formats
        return ALL_BF16 if self.handle.context.probing else self.handle.state.formats

    @property
    def backend(self) -> GemmBackend:
        """What multiplies in this microbatch."""
        override = self.override
        return self.handle.context.backend if override is None or override.backend is None else override.backend

    @property
    def is_alone(self) -> bool:
        """Whether dgrad and wgrad run at once: nothing is exchanged or measured between them."""
        exchanges = self.sequence_parallel or self.allreduce_dgrad
        return not (exchanges or self.handle.delays or self.override is not None)

    @property
    def trains(self) -> bool:
        """Whether the pass uses the formats of the map in force. Only such passes may be captured in CUDA graphs."""
        return self.override is None and not self.handle.context.probing

    def spec(self, operand: str, x: Tensor, rowwise: Format | None, columnwise: Format | None) -> OperandSpec:
        """Return how X or W is quantised. See :meth:`LinearHandle.spec`."""
        return self.handle.spec(operand, x, rowwise, columnwise, on_device=self.trains)


class PrequantizedTensor(torch.Tensor):
    """X or G of a linear as its two operands, which a fused kernel passes in its place. Every operation is refused.

    Autograd passes one tensor from a function to the next. The operands of two GEMMs are four, of other dtypes. So a
    fused function passes a tensor that has the shape and dtype of the unquantised one, no numbers, and the operands.
    """

    operands: OperandPair

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, operands: OperandPair, shape: Sequence[int], like: Tensor) -> PrequantizedTensor:
        """Make the tensor, with the dtype and device of ``like``."""
        tensor: PrequantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        tensor.operands = operands
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse the operation, except that autograd notes the streams that use the operands.

        Raises SnipError if something else than the linear reads the tensor, or autograd adds another gradient to it.
        """
        if func is torch.ops.aten.record_stream.default:
            for tensor in flatten(args[0].operands)[0]:
                tensor.record_stream(args[1])
            return None
        raise SnipError(
            f"{func}: the input or the output gradient of a linear is quantised already and has no numbers, but a hook"
            " or another function reads or adds to it, which --snip-fusions auto does not support;"
            " use --snip-fusions none"
        )


class QuantizedLinear(torch.autograd.Function):
    """Compute Y = X·Wᵀ (+ bias) with X [s(/tp), b, K], W [N, K] and Y [s, b, N] in X's dtype.

    X is saved for the backward as the operand of wgrad. Quantised to 8 bits, it takes half the bytes of bf16. Under
    sequence parallelism the token shard is saved as it is. X, and the gradient of Y, may be a
    :class:`PrequantizedTensor`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        """Run fprop, and save the operand of wgrad and the formats of the call for the backward."""
        handle = call.handle
        backend = call.backend
        # The parameter itself is kept on ctx. Activation checkpointing may replace a saved tensor by one that has no
        # main_grad.
        ctx.weight, ctx.x_shape, ctx.has_bias, ctx.call = weight, x.shape, bias is not None, call
        ctx.formats, ctx.version = call.formats, weight._version
        ctx.recorder = handle.state.recorder if handle.context.probing else None
        fprop, dgrad, wgrad = ctx.formats
        total, saved, saved_format = x, None, wgrad if call.has_backward else None
        if isinstance(x, PrequantizedTensor):
            rowwise, columnwise = x.operands
            y = backend.multiply(Gemm.FPROP, rowwise, weight_operands(call, weight, fprop, dgrad)[0], x.dtype)
            saved = None if columnwise is None else flatten(columnwise)
        else:
            if call.sequence_parallel:
                total, saved_format = gather_tokens(x, call.tp_group), None
                rotation = handle.rotation("x", x, wgrad, on_device=call.trains)
                saved = flatten(SavedShard(x.contiguous(), rotation))
            spec = call.spec("x", total, fprop, saved_format)
            y, operand = backend.forward(total, weight_operands(call, weight, fprop, dgrad)[0], spec)
            saved = saved or operand
        if saved is not None:
            tensors, ctx.structure = saved
            ctx.save_for_backward(*tensors)
        if call.reduce_scatter:
            y = start_reduce_scatter(matrix(y), call.tp_group).result()
        if y.dim() != x.dim():
            y = _unflattened(y, x, call)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, Any, None]:
        """Run dgrad and wgrad."""
        call: LinearCall = ctx.call
        handle, weight, g = call.handle, ctx.weight, grad_outputs[0]
        check_backward(handle.name, (weight,), (ctx.version,))
        fprop, dgrad, wgrad = ctx.formats
        grad_weight: Tensor | None
        x = restored((ctx.saved_tensors, ctx.structure))
        main_grad = main_grad_of(handle, weight)
        _, w = weight_operands(call, weight, fprop, dgrad, refresh=False)
        if not isinstance(g, PrequantizedTensor) and ctx.recorder is None and call.is_alone:
            if call.reduce_scatter:
                g = gather_tokens(g, call.tp_group)
            spec = handle.spec("g", g, dgrad, wgrad, gradient_keys(call, g, dgrad, wgrad), on_device=call.trains)
            d, grad_weight = handle.context.backend.backward(g, w, x, spec, main_grad)
            handle.state.backwards += 1
        else:
            g, d, grad_weight = _backward_in_parts(ctx, g, w, x, main_grad)
        if d.shape != ctx.x_shape:
            d = d.view(ctx.x_shape)
        grad_bias = matrix(g).contiguous().sum(dim=0) if ctx.has_bias else None
        return d, autograd_gradient(weight, grad_weight, main_grad), grad_bias, None


def _backward_in_parts(
    ctx: Any, g: Tensor, w: GemmOperand, x: FlatOperand, main_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run dgrad, start the reduction of its result, and run wgrad while that reduction is in progress.

    Returns:
        G with all tokens, ∂L/∂X of this rank's tokens [..., K], and ∇W. None if wgrad runs later.
    """
    call: LinearCall = ctx.call
    handle, weight, (_, dgrad, wgrad) = call.handle, ctx.weight, ctx.formats
    backend = call.backend
    saved_x: Any = assemble(x)
    x_gather: Exchange | None = None
    if isinstance(g, PrequantizedTensor):
        rowwise, columnwise = g.operands
    else:
        if call.reduce_scatter:
            g = gather_tokens(g, call.tp_group)
        # These collectives come before the gather of X: those of one group run in order, so that quantising G would
        # otherwise wait for the whole gather.
        spec = handle.spec("g", g, dgrad, wgrad, gradient_keys(call, g, dgrad, wgrad), on_device=call.trains)
    if isinstance(saved_x, SavedShard):
        x_gather = start_gather(saved_x.tensor, call.tp_group)
    if not isinstance(g, PrequantizedTensor):
        rowwise, columnwise = backend.quantize(matrix(g).contiguous(), spec)
    handle.state.backwards += 1
    d_local = backend.multiply(Gemm.DGRAD, rowwise, w, g.dtype)
    if x_gather is not None:
        x_gather.wait()

    # A recorder reads the unreduced input gradient as well. The all-reduce works in place, so it gets a copy.
    copied = ctx.recorder is not None and call.allreduce_dgrad
    reduction = _start_reduction(d_local.clone() if copied else d_local, call)
    x_columnwise = saved_x
    if x_gather is not None:
        x_spec = OperandSpec(None, wgrad, rotation=saved_x.rotation)
        x_columnwise = backend.quantize(matrix(x_gather.tensor), x_spec)[1]

    def grad_weight_of() -> Tensor:
        return backend.multiply(Gemm.WGRAD, columnwise, x_columnwise, torch.float32, main_grad)

    grad_weight = None
    if handle.delays and call.trains:
        handle.state.delayed.append(partial(_accumulate, weight, main_grad, grad_weight_of))
    else:
        grad_weight = grad_weight_of()
    d = reduction.result()
    if ctx.recorder is not None:  # all GEMMs of a probe run in bf16, so that X was saved unquantised
        with torch.no_grad():
            reduced = call.sequence_parallel or call.allreduce_dgrad
            summed = d if reduced else unreduced_gradient(handle, d)
            recorded = [x_columnwise.tensor, matrix(g).contiguous(), d_local, matrix(summed)]
            if handle.shares_tokens:  # the recorder sees all of them, as those of other linears do
                recorded = [gather_tokens(tensor, handle.tp_group) for tensor in recorded]
            x_rows, g_rows, *both = recorded
            ctx.recorder.on_backward(x_rows, weight.detach(), g_rows, *both)
    return g, d, grad_weight


@torch.no_grad()
def _accumulate(weight: Tensor, main_grad: Tensor | None, grad_weight_of: Callable[[], Tensor]) -> None:
    """Run a delayed wgrad, and add its result where autograd would have.

    No backward is around it: in bf16 its operand X may require a gradient.
    """
    grad_weight = grad_weight_of()
    if main_grad is None:
        gradient = grad_weight.to(weight.dtype)
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _unflattened(y: Tensor, x: Tensor, call: LinearCall) -> Tensor:
    """Return y [T, N] with the leading dimensions of x, of which a gather or a scatter changes the first."""
    leading: Sequence[int] = x.shape[:-1]
    if call.sequence_parallel or call.reduce_scatter:
        leading = (-1 if y.numel() else 0, *leading[1:])
    return unflattened(y, leading)


def check_backward(name: str, weights: Sequence[Tensor] = (), versions: Sequence[int] = ()) -> None:
    """Raise SnipError if a backward cannot follow its forward, in which the weights' counters had ``versions``."""
    if torch.is_grad_enabled():  # torch's once_differentiable does the same in more time
        raise SnipError(f"{name}: create_graph=True is not supported, because rounding has no derivative")
    if any(weight._version != version for weight, version in zip(weights, versions, strict=True)):
        raise SnipError(f"{name}: its weight was changed between the forward and the backward")


def weight_operands(
    call: LinearCall, weight: Tensor, fprop: Format, dgrad: Format, *, refresh: bool = True
) -> OperandPair:
    """Return the weight of a linear by :func:`current_weights`."""
    quantize, spec = partial(call.backend.quantize, weight), partial(call.spec, "w", weight)
    return current_weights(call, (weight,), (fprop, dgrad), quantize, spec, refresh=refresh)


def current_weights(
    call: LinearCall,
    weights: Sequence[Tensor],
    formats: tuple[Format, Format],
    quantize: Callable[..., OperandPair],
    spec: Callable[[Format | None, Format | None], OperandSpec],
    *,
    refresh: bool,
) -> OperandPair:
    """Return the weights of a linear, or of that of all experts, as the operands of fprop and of dgrad.

    They are quantised if one has changed. With CUDA graphs only a forward may quantise them anew (``refresh``). Weights
    that are gathered for every pass become the operands of that pass alone.

    Args:
        formats: those of fprop and dgrad, of which ``spec`` returns how the weights are quantised.
        quantize: called with that spec and, with CUDA graphs, the pair of operands to write to.
    """
    state, (fprop, dgrad) = call.handle.state, formats
    if call.handle.context.fsdp_sharded:
        return quantize(spec(fprop, None) if refresh else spec(None, dgrad))
    if state.graphed is None or not call.trains:
        return state.weights.get(call.backend, weights, formats, lambda: quantize(spec(fprop, dgrad)))
    if refresh:
        key = (call.backend, fprop, dgrad, weights[0].data_ptr())
        return state.graphed.weight.refresh(key, quantize, lambda: spec(fprop, dgrad))
    return state.graphed.weight.operands


def gradient_keys(call: LinearCall, g: Tensor, *formats: Format) -> GradientKeys:
    """Return the keys of stochastic rounding of G. They are None unless dgrad or wgrad uses it.

    With CUDA graphs this counts a microbatch, so that it is called once in each backward.

    Args:
        call: the arguments of the forward.
        g: G [..., N], or a tensor of as many rows.
        formats: formats of dgrad and wgrad.
    """
    handle = call.handle
    context, graphed, cols = handle.context, handle.state.graphed, handle.columns
    if STOCHASTIC.isdisjoint(formats):
        return GradientKeys(None, None, cols)
    first_row = handle.tp_rank * math.prod(g.shape[:-1]) if handle.shares_tokens else 0
    if graphed is not None and call.trains:
        dgrad, wgrad = graphed.next_keys()
        return GradientKeys(dgrad, wgrad, cols, first_row=first_row, paired=handle.paired)
    identity = (context.seed, context.step, handle.global_microbatch(handle.state.backwards), handle.index)
    first, second = derive_seeds(identity, GRADIENT_GEMMS)
    return GradientKeys(first, second, cols, first_row=first_row, paired=handle.paired)


def unreduced_gradient(handle: LinearHandle, d: Tensor) -> Tensor:
    """Return an input gradient that the linear itself does not reduce, summed over tensor parallel ranks.

    Only recorders need the sum here: in training Megatron's token dispatcher computes it for experts, and for shared
    experts that overlap with it.
    """
    if handle.tp_group is None or handle.parallel != "column":
        return d
    total = d.clone()
    dist.all_reduce(total, group=handle.tp_group)
    return total


def main_grad_of(handle: LinearHandle, weight: Tensor) -> Tensor | None:
    """Return the tensor that ∇W is added to, or None if autograd gets ∇W."""
    return None if handle.context.fsdp_sharded else getattr(weight, "main_grad", None)


def autograd_gradient(
    weight: Tensor, grad_weight: Tensor | None, main_grad: Tensor | None, placeholder: Tensor | None = None
) -> Tensor | None:
    """Return the gradient that autograd gets for the weight.

    Without a ``main_grad`` (FP32 or bf16, allocated by DDP) this is ∇W in the weight's dtype, or None if it is delayed.
    Otherwise ∇W is added to ``main_grad``, without a bf16 copy. If the weight has ``grad_added_to_main_grad``, autograd
    gets a placeholder, because DDP with overlap_grad_reduce requires a gradient, and because autograd waits at the end
    for the stream of a weight that gets none, which a capture may not. Otherwise it gets None. ``placeholder`` is
    memory in the weight's shape and dtype. If it is None, new memory is used.
    """
    if main_grad is None:
        return None if grad_weight is None else grad_weight.to(weight.dtype)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # A tensor of its own: autograd keeps a gradient that nothing else refers to, and copies any other.
    return gradient_placeholder(weight) if placeholder is None else placeholder.detach()


def gradient_placeholder(weight: Tensor) -> Tensor:
    """Return the placeholder of a gradient that has been added to ``main_grad``."""
    return (torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like)(weight)


# -- what tensor parallel ranks exchange around the GEMMs ------------------------------------------------------------
class SavedShard(NamedTuple):
    """X of this rank's tokens [s/tp, b, K], saved for wgrad, and the Hadamard transform of wgrad's format, if any."""

    tensor: Tensor
    rotation: Rotation | None


class Exchange(NamedTuple):
    """A collective in progress, and the tensor that it writes. There is no collective if ``work`` is None."""

    tensor: Tensor
    work: Any = None

    def wait(self) -> None:
        """Make the current stream, or a CPU, wait for the collective."""
        if self.work is not None:
            self.work.wait()

    def result(self) -> Tensor:
        """Wait for the collective, and return the result."""
        self.wait()
        return self.tensor


def gather_tokens(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the token shards x [s/tp, b, K] of all ranks along dimension 0."""
    return start_gather(x.contiguous(), group).result()


def start_gather(x: Tensor, group: dist.ProcessGroup | None) -> Exchange:
    """Start the gather of the contiguous token shards x [s/tp, b, K] of all ranks along dimension 0."""
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    return Exchange(out, dist.all_gather_into_tensor(out, x, group=group, async_op=True))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Exchange:
    """Start the sum over ranks of ``x`` [T, ...], of which this rank gets its T/ranks tokens."""
    shard = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    return Exchange(shard, dist.reduce_scatter_tensor(shard, x, group=group, async_op=True))


def _start_reduction(d: Tensor, call: LinearCall) -> Exchange:
    """Start the reduction of d [T, K], the input gradient, over tensor parallel ranks."""
    if call.sequence_parallel:
        return start_reduce_scatter(d, call.tp_group)
    work = dist.all_reduce(d, group=call.tp_group, async_op=True) if call.allreduce_dgrad else None
    return Exchange(d, work)
