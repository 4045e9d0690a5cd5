"""The autograd function of a quantised linear: three GEMMs, each in its own format, and Megatron's communication.

It does what Megatron's own function does around the GEMMs: the gather of a sequence parallel input, the reduction of
the input gradient, overlapped with wgrad, and the accumulation into ``main_grad``. It does not import Megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.gemm.backend import GemmBackend
from snip_megatron.gemm.operands import GradientKeys, Plain, Side, disassemble
from snip_megatron.layers.context import ALL_BF16, GEMM_INDEX, Forced, LinearHandle
from snip_megatron.layers.forcing import nudged, output_error, report_error
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import derive_seeds
from snip_megatron.quantization.formats import STOCHASTIC
from snip_megatron.quantization.hadamard import Rotation

_GRADIENT_GEMMS = GEMM_INDEX[Gemm.DGRAD], GEMM_INDEX[Gemm.WGRAD]


@dataclass(frozen=True)
class LinearCall:
    """The arguments of one forward other than tensors. The backward uses the same object.

    Attributes:
        handle: the linear.
        backend: the backend that runs the GEMMs.
        sequence_parallel: whether the input is this rank's token shard. It is then gathered, and its gradient is
            reduce-scattered.
        allreduce_dgrad: whether the input is replicated. Its gradient is then all-reduced.
        tp_group: the tensor parallel group. Both of the above need it.
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

    @property
    def formats(self) -> tuple[Format, Format, Format]:
        """Formats of (fprop, dgrad, wgrad) in this microbatch."""
        if self.forced is not None:
            return self.forced.formats
        return ALL_BF16 if self.handle.context.probing else self.handle.formats

    @property
    def trains(self) -> bool:
        """Whether the pass uses the formats of the map in force. Only such passes may be captured in CUDA graphs."""
        return self.forced is None and not self.handle.context.probing


class QuantizedLinear(torch.autograd.Function):
    """Compute Y = X·Wᵀ (+ bias) with X [s(/tp), b, K], W [N, K] and Y [s, b, N] in X's dtype.

    X is saved for the backward as the operand of wgrad. Quantised to 8 bits, it takes half the bytes of bf16. Under
    sequence parallelism the token shard is saved unquantised: wgrad's tiles run along tokens, and the tiles of the
    gathered X differ from those of the shard.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
    ) -> torch.Tensor:
        """Run fprop, and save the operand of wgrad and the formats of the call for the backward."""
        handle, backend = call.handle, call.backend
        # The parameter itself is kept on ctx. Activation checkpointing may replace a saved tensor by one that has no
        # main_grad.
        ctx.weight, ctx.x_shape, ctx.has_bias, ctx.call = weight, x.shape, bias is not None, call
        ctx.formats, ctx.error = call.formats, None
        ctx.recorder = handle.recorder if handle.context.probing else None
        handle.to(weight.device)
        fprop, dgrad, wgrad = ctx.formats
        total = _gather(x, call.tp_group) if call.sequence_parallel else x
        kept_format = wgrad if call.has_backward and not call.sequence_parallel else None
        amax = handle.shared_amax("x", x, (fprop, kept_format))
        rotation = _rotation(call, "x", _matrix(total), kept_format)
        x_side, kept = backend.quantize_input(_matrix(total), fprop, kept_format, amax=amax, rotation=rotation)
        w_side, _ = _weight(call, weight, fprop, dgrad, refresh=True)
        tensors, ctx.assemble = disassemble(Plain(x, wgrad) if kept is None else kept)
        ctx.save_for_backward(*tensors)
        y = backend.fprop(x_side, w_side, dtype=x.dtype)
        if call.forced is not None:
            y = nudged(call.forced, Gemm.FPROP, _matrix(total), weight.t(), y)
            if call.has_backward:
                ctx.error = output_error(call.forced, handle, backend, _matrix(total), weight, y)
        y = y.view(*total.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Any, None]:
        """Run dgrad, start the reduction of its result, and run wgrad while that reduction is in progress."""
        call: LinearCall = ctx.call
        handle, backend, weight = call.handle, call.backend, ctx.weight
        fprop, dgrad, wgrad = ctx.formats
        kept, gather = ctx.assemble(*ctx.saved_tensors), None
        g = _matrix(grad_outputs[0]).contiguous()
        # These collectives come before the gather: those of one group run in order, so that quantising G would
        # otherwise wait for the whole gather.
        amax = handle.shared_amax("g", g, (dgrad, wgrad))
        rotation = _rotation(call, "g", g, wgrad)
        if call.sequence_parallel:
            gathered, gather = _gather_async(kept.tensor, call.tp_group)
        keys = _keys(call, dgrad, wgrad)
        g_row, g_col = backend.quantize_gradient(g, dgrad, wgrad, keys, amax=amax, rotation=rotation)
        handle.backwards += 1
        _, w_side = _weight(call, weight, fprop, dgrad, refresh=False)
        d_local = backend.dgrad(g_row, w_side, dtype=g.dtype)
        if call.forced is not None:
            d_local = nudged(call.forced, Gemm.DGRAD, g, weight, d_local)
            report_error(call.forced, g, ctx.error)
        if gather is not None:
            gather.wait()

        # A recorder reads the unreduced input gradient as well. The all-reduce works in place, so it gets a copy.
        copied = ctx.recorder is not None and call.allreduce_dgrad
        d, reduction = _reduce_async(d_local.clone() if copied else d_local, ctx.x_shape, call)
        if call.sequence_parallel:
            of_x = _rotation(call, "x", _matrix(gathered), wgrad)
            _, kept = backend.quantize_input(_matrix(gathered), None, wgrad, rotation=of_x)
        grad_weight = _accumulate(backend, weight, g_col, kept)
        grad_bias = g.sum(dim=0) if ctx.has_bias else None
        if reduction is not None:
            reduction.wait()
        if ctx.recorder is not None:  # all GEMMs of a probe run in bf16, so that X was saved unquantised
            with torch.no_grad():
                whole = _expert_gradient(handle, d) if handle.expert is not None else d
                ctx.recorder.on_backward(kept.tensor, weight.detach(), g, d_local, whole.reshape(-1, d.shape[-1]))
        return d.view(ctx.x_shape), grad_weight, grad_bias, None


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight(
    call: LinearCall, weight: torch.Tensor, fprop: Format, dgrad: Format, *, refresh: bool
) -> tuple[Side, Side]:
    handle = call.handle
    if handle.held is not None and call.trains:
        if not refresh:
            return handle.held.sides
        return handle.held.refresh(call.backend, weight, fprop, dgrad, partial(handle.shared_amax, "w"))
    return handle.weights.get(call.backend, weight, fprop, dgrad, partial(handle.shared_amax, "w"))


def _keys(call: LinearCall, *formats: Format) -> GradientKeys:
    """Return the keys of stochastic rounding of G. They are None unless dgrad or wgrad uses it."""
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


def _accumulate(backend: GemmBackend, weight: torch.Tensor, g: Side, x: Side) -> torch.Tensor | None:
    """Run wgrad. If the weight has a ``main_grad`` (FP32, made by DDP), accumulate into it, without a bf16 copy.

    Returns:
        The gradient that autograd gets for the weight. Without ``main_grad`` this is wgrad in the weight's dtype. If
        the weight has ``grad_added_to_main_grad`` it is a dummy tensor, because DDP with overlap_grad_reduce requires a
        gradient. Otherwise it is None.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return backend.wgrad(g, x, out=None).to(weight.dtype)
    backend.wgrad(g, x, out=main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)


def _gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    gathered, handle = _gather_async(x, group)
    handle.wait()
    return gathered


def _gather_async(x: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Any]:
    """Start the all-gather of the token shards x [s/tp, b, K] along dimension 0. Returns the result and its work."""
    size = dist.get_world_size(group)
    out = torch.empty((x.shape[0] * size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=True)


def _reduce_async(d: torch.Tensor, x_shape: torch.Size, call: LinearCall) -> tuple[torch.Tensor, Any]:
    """Start the reduction of d [T, K], the input gradient, over tensor parallel ranks. Returns result and work."""
    if call.sequence_parallel:
        shard = torch.empty((math.prod(x_shape[:-1]), x_shape[-1]), dtype=d.dtype, device=d.device)
        return shard, dist.reduce_scatter_tensor(shard, d, group=call.tp_group, async_op=True)
    if call.allreduce_dgrad:
        return d, dist.all_reduce(d, group=call.tp_group, async_op=True)
    return d, None
