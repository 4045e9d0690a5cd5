"""The autograd function of a quantised linear: three GEMMs, each in its own format, and Megatron's communication.

It reproduces what Megatron's own function does around the GEMMs (gather of a sequence-parallel input, overlapped
reduction of the input gradient, accumulation into ``main_grad``) and knows nothing of Megatron itself.
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

_GRADIENT_GEMMS = GEMM_INDEX[Gemm.DGRAD], GEMM_INDEX[Gemm.WGRAD]


@dataclass(frozen=True)
class LinearCall:
    """Everything but the tensors: fixed at the forward, so that the backward uses the same map.

    Attributes:
        handle: the linear.
        backend: runs the GEMMs.
        sequence_parallel: the input is this rank's token shard: gather it, reduce-scatter its gradient.
        allreduce_dgrad: the input is replicated: all-reduce its gradient.
        tp_group: the tensor parallel group, needed for either.
        has_backward: whether a backward may follow, which X is quantised and kept for.
        forced: what a measuring pass asks; None outside of one.
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
        """(fprop, dgrad, wgrad) of this microbatch."""
        if self.forced is not None:
            return self.forced.formats
        return ALL_BF16 if self.handle.context.probing else self.handle.formats


class QuantizedLinear(torch.autograd.Function):
    """Y = X·Wᵀ (+ bias). X [s(/tp), b, K], W [N, K], Y [s, b, N] in X's dtype.

    X is kept for the backward as wgrad takes it, which is half the bytes once a backend has quantised it. Under
    sequence parallelism the shard is kept as it is: tiles run along tokens, and the gathered X has other ones.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
    ) -> torch.Tensor:
        """Run fprop in the format in force now and remember all three formats for the backward."""
        handle, backend = call.handle, call.backend
        # The parameter itself: what checkpointing's hooks make of a saved tensor has no main_grad.
        ctx.weight, ctx.x_shape, ctx.has_bias, ctx.call = weight, x.shape, bias is not None, call
        ctx.formats, ctx.error = call.formats, None
        ctx.recorder = handle.recorder if handle.context.probing else None
        handle.to(weight.device)
        fprop, dgrad, wgrad = ctx.formats
        total = _gather(x, call.tp_group) if call.sequence_parallel else x
        kept_format = wgrad if call.has_backward and not call.sequence_parallel else None
        amax = handle.shared_amax("x", x, (fprop, kept_format))
        x_side, kept = backend.quantize_input(_matrix(total), fprop, kept_format, amax=amax)
        w_side, _ = _weight(call, weight, fprop, dgrad)
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
        """dgrad, its reduction, and wgrad accumulated into ``main_grad`` while that reduction runs."""
        call: LinearCall = ctx.call
        handle, backend, weight = call.handle, call.backend, ctx.weight
        fprop, dgrad, wgrad = ctx.formats
        kept, gather = ctx.assemble(*ctx.saved_tensors), None
        g = _matrix(grad_outputs[0]).contiguous()
        # Before the gather: collectives of a group run one after the other, and G would wait for all of it.
        amax = handle.shared_amax("g", g, (dgrad, wgrad))
        if call.sequence_parallel:
            gathered, gather = _gather_async(kept.tensor, call.tp_group)
        g_row, g_col = backend.quantize_gradient(g, dgrad, wgrad, _keys(call), amax=amax)
        handle.backwards += 1
        _, w_side = _weight(call, weight, fprop, dgrad)
        d_local = backend.dgrad(g_row, w_side, dtype=g.dtype)
        if call.forced is not None:
            d_local = nudged(call.forced, Gemm.DGRAD, g, weight, d_local)
            report_error(call.forced, g, ctx.error)
        if gather is not None:
            gather.wait()

        # A recorder needs the partial input gradient as well: an all-reduce in place then works on a copy.
        copied = ctx.recorder is not None and call.allreduce_dgrad
        d, reduction = _reduce_async(d_local.clone() if copied else d_local, ctx.x_shape, call)
        if call.sequence_parallel:
            _, kept = backend.quantize_input(_matrix(gathered), None, wgrad)
        grad_weight = _accumulate(backend, weight, g_col, kept)
        grad_bias = g.sum(dim=0) if ctx.has_bias else None
        if reduction is not None:
            reduction.wait()
        if ctx.recorder is not None:  # in probes everything is bf16: X was kept as it is
            with torch.no_grad():
                whole = _expert_gradient(handle, d) if handle.expert is not None else d
                ctx.recorder.on_backward(kept.tensor, weight.detach(), g, d_local, whole.reshape(-1, d.shape[-1]))
        return d.view(ctx.x_shape), grad_weight, grad_bias, None


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight(call: LinearCall, weight: torch.Tensor, fprop: Format, dgrad: Format) -> tuple[Side, Side]:
    handle = call.handle
    return handle.weights.get(call.backend, weight, fprop, dgrad, partial(handle.shared_amax, "w"))


def _keys(call: LinearCall) -> GradientKeys:
    """Keys of stochastic rounding of G in the linear's next backward."""
    handle = call.handle
    context = handle.context
    global_microbatch = handle.global_microbatch(handle.backwards if call.forced is None else call.forced.microbatch)
    dgrad, wgrad = derive_seeds((context.seed, context.step, global_microbatch, handle.index), _GRADIENT_GEMMS)
    return GradientKeys(dgrad, wgrad, handle.out_features)


def _expert_gradient(handle: LinearHandle, d: torch.Tensor) -> torch.Tensor:
    """D of an expert summed over the ranks that share it, for a recorder: in training Megatron's dispatcher does it."""
    if handle.tp_group is None or handle.parallel == "row":
        return d
    total = d.clone()
    dist.all_reduce(total, group=handle.tp_group)
    return total


def _accumulate(backend: GemmBackend, weight: torch.Tensor, g: Side, x: Side) -> torch.Tensor | None:
    """wgrad. With DDP it goes straight into FP32 ``main_grad`` (never through a bf16 tensor); without, it is returned.

    Returns what autograd needs: a dummy where ``main_grad`` has it already, because DDP under overlap_grad_reduce
    insists on a gradient.
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
    """All-gather the token shards of x [s/tp, b, K] along the first dimension."""
    size = dist.get_world_size(group)
    out = torch.empty((x.shape[0] * size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=True)


def _reduce_async(d: torch.Tensor, x_shape: torch.Size, call: LinearCall) -> tuple[torch.Tensor, Any]:
    """Start the reduction of the input gradient d [T, K] that the layer's parallelism asks for."""
    if call.sequence_parallel:
        shard = torch.empty((math.prod(x_shape[:-1]), x_shape[-1]), dtype=d.dtype, device=d.device)
        return shard, dist.reduce_scatter_tensor(shard, d, group=call.tp_group, async_op=True)
    if call.allreduce_dgrad:
        return d, dist.all_reduce(d, group=call.tp_group, async_op=True)
    return d, None
