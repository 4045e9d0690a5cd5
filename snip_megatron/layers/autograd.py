"""The autograd function of a quantised linear: three GEMMs, each in its own format, and Megatron's communication.

It does what Megatron's own function does around the GEMMs: the gather of a sequence parallel input, the reduction of
the input gradient, overlapped with wgrad, and the accumulation into ``main_grad``. It does not import Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import GemmBackend, Sides, matrix, unflattened
from snip_megatron.gemm.operands import Apart, GradientKeys, Side, disassemble
from snip_megatron.gemm.parcels import Parcel, disassemble_parcel
from snip_megatron.layers.amax import gathered_amaxes
from snip_megatron.layers.context import ALL_BF16, GEMM_INDEX, Forced, LinearHandle
from snip_megatron.layers.exchange import (
    Gather,
    gather_tokens,
    has_whole_tiles,
    plain_shard,
    quantised_by,
    start_gather,
)
from snip_megatron.layers.forcing import nudged, output_error, report_error
from snip_megatron.layers.handover import check_nothing
from snip_megatron.layers.reductions import Reduction, no_reduction, start_all_reduce, start_reduce_scatter
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import derive_seeds
from snip_megatron.quantization.formats import STOCHASTIC
from snip_megatron.quantization.hadamard import Rotation

_GRADIENT_GEMMS = GEMM_INDEX[Gemm.DGRAD], GEMM_INDEX[Gemm.WGRAD]


class LinearCall(NamedTuple):
    """The arguments of one forward other than tensors. The backward uses the same object.

    Every forward makes one, and a tuple is made faster than a dataclass.

    Attributes:
        handle: the linear.
        backend: the backend that runs the GEMMs.
        sequence_parallel: whether the input is this rank's token shard. It is then gathered, and its gradient is
            reduce-scattered.
        allreduce_dgrad: whether the input is replicated. Its gradient is then all-reduced.
        scatters: whether the output is reduce-scattered, so that the output gradient is this rank's token shard. It is
            then gathered.
        packs_gradient: with ``scatters``, whether the output gradient is quantised before it is gathered.
        tp_group: the tensor parallel group. All of the above need it.
        has_backward: whether a backward may follow. X is quantised for wgrad only then.
        forced: what a measuring pass requests; None during training and in probes.
    """

    handle: LinearHandle
    backend: GemmBackend
    sequence_parallel: bool
    allreduce_dgrad: bool
    tp_group: dist.ProcessGroup | None
    has_backward: bool = True
    forced: Forced | None = None
    scatters: bool = False
    packs_gradient: bool = False

    @property
    def formats(self) -> tuple[Format, Format, Format]:
        """Formats of (fprop, dgrad, wgrad) in this microbatch."""
        if self.forced is not None:
            return self.forced.formats
        return ALL_BF16 if self.handle.context.probing else self.handle.formats

    @property
    def is_alone(self) -> bool:
        """Whether dgrad and wgrad run at once: nothing is exchanged or measured between them."""
        return not (self.sequence_parallel or self.allreduce_dgrad or self.packs_gradient or self.forced is not None)

    @property
    def trains(self) -> bool:
        """Whether the pass uses the formats of the map in force. Only such passes may be captured in CUDA graphs."""
        return self.forced is None and not self.handle.context.probing

    def packs(self, x: torch.Tensor) -> bool:
        """Whether the token shard x [s/tp, b, K] is quantised before it is gathered."""
        packs = self.sequence_parallel and self.trains and self.handle.context.packs
        return packs and has_whole_tiles(math.prod(x.shape[:-1]))

    def reduces(self, fmt: Format) -> bool:
        """Whether the partial results of a GEMM in ``fmt`` are quantised before they are summed over ranks."""
        return self.trains and self.handle.reduces(fmt)


class QuantizedLinear(torch.autograd.Function):
    """Compute Y = X·Wᵀ (+ bias) with X [s(/tp), b, K], W [N, K] and Y [s, b, N] in X's dtype.

    X is saved for the backward as the operand of wgrad. Quantised to 8 bits, it takes half the bytes of bf16. Under
    sequence parallelism the token shard is saved: as it is, or quantised (``--snip-communication gather``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: LinearCall,
        given: Sides | None = None,
    ) -> torch.Tensor:
        """Run fprop, and save the operand of wgrad and the formats of the call for the backward.

        With ``given``, the operands of X, nothing reads the numbers of x.
        """
        handle, backend = call.handle, call.backend
        # The parameter itself is kept on ctx. Activation checkpointing may replace a saved tensor by one that has no
        # main_grad.
        ctx.weight, ctx.x_shape, ctx.has_bias, ctx.call = weight, x.shape, bias is not None, call
        ctx.formats, ctx.error, ctx.version = call.formats, None, weight._version
        ctx.given = None  # or the operands of G, which the backward of an activation hands over
        ctx.recorder = handle.recorder if handle.context.probing else None
        handle.to(weight.device)
        fprop, dgrad, wgrad = ctx.formats
        kept_format = wgrad if call.has_backward else None
        total, side, kept, amax, rotation = x, None, None, None, None
        if given is not None:
            side, kept = given
        elif call.packs(x):
            side, kept = _exchanged_input(call, matrix(x).contiguous())
        elif call.sequence_parallel:
            total, kept_format = gather_tokens(x, call.tp_group), None
            kept = plain_shard(x, backend, wgrad, _rotation(call, "x", x, wgrad))
        else:
            amax = handle.shared_amax("x", x, (fprop, kept_format))
            rotation = _rotation(call, "x", x, kept_format)
        w_side, _ = _weight(call, weight, fprop, dgrad, refresh=True)
        saved = None if kept is None else _disassembled(kept)
        if side is not None:
            y = backend.fprop(side, w_side, dtype=x.dtype)
        else:
            y, own = backend.forward(total, w_side, fprop, kept_format, amax=amax, rotation=rotation)
            saved = saved or own
        if saved is not None:
            tensors, ctx.assemble = saved
            ctx.save_for_backward(*tensors)
        if call.forced is not None:
            y = nudged(call.forced, Gemm.FPROP, matrix(total), weight.t(), matrix(y))
            if call.has_backward:
                ctx.error = output_error(call.forced, handle, backend, matrix(total), weight, y)
        if call.scatters:
            y = start_reduce_scatter(matrix(y), call.tp_group, quantised=call.reduces(fprop)).result()
        if side is not None or call.forced is not None or call.scatters:
            y = _unflattened(y, x, call)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Any, None, None]:
        """Run dgrad and wgrad."""
        call: LinearCall = ctx.call
        handle, weight, g = call.handle, ctx.weight, grad_outputs[0]
        if torch.is_grad_enabled():  # torch's once_differentiable does the same in more time
            raise SnipError(f"{handle.name}: create_graph=True is not supported, because rounding has no derivative")
        if weight._version != ctx.version:
            raise SnipError(f"{handle.name}: its weight was changed between the forward and the backward")
        fprop, dgrad, wgrad = ctx.formats
        x: Apart = ctx.saved_tensors, ctx.assemble
        given, ctx.given = ctx.given, None
        amax = rotation = None
        if given is not None:
            check_nothing(g, f"the output gradient of {handle.name}")
        elif not call.packs_gradient:
            if call.scatters:
                g = gather_tokens(g, call.tp_group)
            # These collectives come before the gather of X: those of one group run in order, so that quantising G would
            # otherwise wait for the whole gather.
            amax = handle.shared_amax("g", g, (dgrad, wgrad))
            rotation = _rotation(call, "g", g, wgrad)
        _, w_side = _weight(call, weight, fprop, dgrad, refresh=False)
        main_grad = getattr(weight, "main_grad", None)
        if given is None and ctx.recorder is None and call.is_alone:
            keys = gradient_keys(call, dgrad, wgrad)
            d, grad_weight = call.backend.backward(
                g, w_side, x, dgrad, wgrad, keys, out=main_grad, amax=amax, rotation=rotation
            )
            handle.backwards += 1
        else:
            d, grad_weight = _backward_in_parts(ctx, g, w_side, x, given, main_grad, amax, rotation)
        if d.shape != ctx.x_shape:
            d = d.view(ctx.x_shape)
        grad_bias = matrix(g).contiguous().sum(dim=0) if ctx.has_bias else None
        return d, _passed_on(weight, grad_weight, main_grad), grad_bias, None, None


def _backward_in_parts(
    ctx: Any,
    g: torch.Tensor,
    w_side: Side,
    x: Apart,
    given: Sides | None,
    main_grad: torch.Tensor | None,
    amax: torch.Tensor | None,
    rotation: Rotation | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run dgrad, start the reduction of its result, and run wgrad while that reduction is in progress.

    Returns:
        ∂L/∂X of this rank's tokens [..., K], and ∇W as :meth:`GemmBackend.wgrad` returns it.
    """
    call: LinearCall = ctx.call
    handle, backend, weight = call.handle, call.backend, ctx.weight
    _, dgrad, wgrad = ctx.formats
    tensors, assemble = x
    kept, x_gather, g_gather = assemble(*tensors), None, None
    if isinstance(kept, Parcel):
        x_gather = start_gather(kept, call.tp_group)
    if given is not None:
        g_row, g_col = given
        d_local = backend.dgrad(g_row, w_side, dtype=g.dtype)
    elif call.packs_gradient:
        g_row, g_gather = _exchanged_gradient(call, matrix(g).contiguous(), dgrad, wgrad)
        d_local = backend.dgrad(g_row, w_side, dtype=g.dtype)
    else:
        keys = gradient_keys(call, dgrad, wgrad)
        d_local, g_col = backend.input_gradient(g, w_side, dgrad, wgrad, keys, amax=amax, rotation=rotation)
    handle.backwards += 1
    if call.forced is not None:
        rows = matrix(g).contiguous()
        d_local = nudged(call.forced, Gemm.DGRAD, rows, weight, matrix(d_local))
        report_error(call.forced, rows, ctx.error)
    for gather in (x_gather, g_gather):
        if gather is not None:
            gather.wait()

    # A recorder reads the unreduced input gradient as well. The all-reduce works in place, so it gets a copy.
    copied = ctx.recorder is not None and call.allreduce_dgrad
    reduction = _start_reduction(d_local.clone() if copied else d_local, call, dgrad)
    x_col: Any = kept if x_gather is None else x_gather.opened()
    grad_weight = backend.wgrad(g_col if g_gather is None else g_gather.opened(), x_col, out=main_grad)
    d = reduction.result()
    if ctx.recorder is not None:  # all GEMMs of a probe run in bf16, so that X was saved unquantised
        with torch.no_grad():
            whole = _expert_gradient(handle, d) if handle.expert is not None else d
            rows = matrix(g).contiguous()
            ctx.recorder.on_backward(x_col.tensor, weight.detach(), rows, matrix(d_local), matrix(whole))
    return d, grad_weight


def _exchanged_input(call: LinearCall, x: torch.Tensor) -> tuple[Side, Parcel | None]:
    """Quantise a shard of X [T/tp, K] and gather it for fprop.

    Returns:
        X as fprop takes it, and the shard as wgrad will gather it, or None if there is no backward.
    """
    backend, (fprop, _, wgrad) = call.backend, call.formats
    formats = (fprop, wgrad if call.has_backward else None)
    row, col = quantised_by(backend.quantize_input, x, formats, gathered_amaxes(x, formats, call.tp_group))
    gather = start_gather(backend.pack(row, fprop, 1), call.tp_group)
    kept = None if col is None else backend.pack(col, wgrad, 0)
    gather.wait()
    return gather.opened(), kept


def _exchanged_gradient(call: LinearCall, g: torch.Tensor, dgrad: Format, wgrad: Format) -> tuple[Side, Gather]:
    """Quantise a shard of G [T/tp, N] and gather it. Returns G as dgrad takes it, and the gather for wgrad."""
    backend, group = call.backend, call.tp_group
    keys = gradient_keys(call, dgrad, wgrad)._replace(first_row=call.handle.tp_rank * g.shape[0])
    quantise = partial(_quantize_gradient, backend, keys)
    row, col = quantised_by(quantise, g, (dgrad, wgrad), gathered_amaxes(g, (dgrad, wgrad), group))
    first, second = start_gather(backend.pack(row, dgrad, 1), group), start_gather(backend.pack(col, wgrad, 0), group)
    first.wait()
    return first.opened(), second


def _quantize_gradient(
    backend: GemmBackend,
    keys: GradientKeys,
    g: torch.Tensor,
    dgrad: Format | None,
    wgrad: Format | None,
    amax: torch.Tensor | None,
) -> Sides:
    return backend.quantize_gradient(g, dgrad, wgrad, keys, amax=amax)


def _unflattened(y: torch.Tensor, x: torch.Tensor, call: LinearCall) -> torch.Tensor:
    """Return y [T, N] with the leading dimensions of x, of which a gather or a scatter changes the first."""
    leading: Sequence[int] = x.shape[:-1]
    if call.sequence_parallel or call.scatters:
        leading = (-1 if y.numel() else 0, *leading[1:])
    return unflattened(y, leading)


def _disassembled(kept: Side | Parcel) -> Apart:
    return disassemble_parcel(kept) if isinstance(kept, Parcel) else disassemble(kept)


def _weight(
    call: LinearCall, weight: torch.Tensor, fprop: Format, dgrad: Format, *, refresh: bool
) -> tuple[Side, Side]:
    handle = call.handle

    def shared_amax(w: torch.Tensor, formats: Iterable[Format]) -> torch.Tensor | None:
        return handle.shared_amax("w", w, formats)

    if handle.held is not None and call.trains:
        if not refresh:
            return handle.held.sides
        return handle.held.refresh(call.backend, weight, fprop, dgrad, shared_amax)
    return handle.weights.get(call.backend, weight, fprop, dgrad, shared_amax)


def gradient_keys(call: LinearCall, *formats: Format) -> GradientKeys:
    """Return the keys of stochastic rounding of G. They are None unless dgrad or wgrad uses it.

    With CUDA graphs this counts a microbatch, so that it is called once in each backward.
    """
    handle = call.handle
    if STOCHASTIC.isdisjoint(formats):
        return GradientKeys(None, None, handle.out_features)
    if handle.device_keys is not None and call.trains:
        return GradientKeys(*handle.device_keys(), handle.out_features)
    context = handle.context
    global_microbatch = handle.global_microbatch(handle.backwards if call.forced is None else call.forced.microbatch)
    dgrad, wgrad = derive_seeds((context.seed, context.step, global_microbatch, handle.index), _GRADIENT_GEMMS)
    return GradientKeys(dgrad, wgrad, handle.out_features)


def _rotation(call: LinearCall, operand: str, x: torch.Tensor, wgrad: Format | None) -> Rotation | None:
    return call.handle.rotation(operand, x, wgrad, on_device=call.trains)


def _expert_gradient(handle: LinearHandle, d: torch.Tensor) -> torch.Tensor:
    """Return the input gradient of an expert, summed over the tensor parallel ranks that share the expert.

    Only recorders need the sum here: in training Megatron's token dispatcher computes it.
    """
    if handle.tp_group is None or handle.parallel == "row":
        return d
    total = d.clone()
    dist.all_reduce(total, group=handle.tp_group)
    return total


def _passed_on(weight: torch.Tensor, grad_weight: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient that autograd gets for the weight.

    Without a ``main_grad`` (FP32, made by DDP) this is ∇W in the weight's dtype. Otherwise ∇W has been added to
    ``main_grad``, without a bf16 copy. If the weight has ``grad_added_to_main_grad``, autograd gets a dummy tensor,
    because DDP with overlap_grad_reduce requires a gradient. Otherwise it gets None.
    """
    if main_grad is None:
        return grad_weight.to(weight.dtype)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)


def _start_reduction(d: torch.Tensor, call: LinearCall, dgrad: Format) -> Reduction:
    """Start the reduction of d [..., K], the input gradient, over tensor parallel ranks."""
    if call.sequence_parallel:
        quantised = call.reduces(dgrad)
        return start_reduce_scatter(matrix(d) if quantised else d, call.tp_group, quantised=quantised)
    return start_all_reduce(d, call.tp_group) if call.allreduce_dgrad else no_reduction(d)
