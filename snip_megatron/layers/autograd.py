"""The autograd function of a quantised linear: three GEMMs, each in its own format, and Megatron's communication.

It reproduces what Megatron's own function does around the GEMMs (gather of a sequence-parallel input, overlapped
reduction of the input gradient, accumulation into ``main_grad``) and knows nothing of Megatron itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.gemm.backend import GemmBackend
from snip_megatron.layers.context import GEMM_INDEX, LinearHandle
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import derive_seed


@dataclass(frozen=True)
class LinearCall:
    """Everything but the tensors: fixed at the forward, so that the backward uses the same map.

    Attributes:
        handle: the linear.
        backend: runs the GEMMs.
        sequence_parallel: the input is this rank's token shard: gather it, reduce-scatter its gradient.
        allreduce_dgrad: the input is replicated: all-reduce its gradient.
        tp_group: the tensor parallel group, needed for either.
    """

    handle: LinearHandle
    backend: GemmBackend
    sequence_parallel: bool
    allreduce_dgrad: bool
    tp_group: dist.ProcessGroup | None


class QuantizedLinear(torch.autograd.Function):
    """Y = X·Wᵀ (+ bias). X [s(/tp), b, K], W [N, K], Y [s, b, N] in X's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
    ) -> torch.Tensor:
        """Run fprop in the format in force now and remember all three formats for the backward."""
        context = call.handle.context
        ctx.formats = (Format.BF16,) * 3 if context.probing else call.handle.formats
        ctx.recorder = call.handle.recorder if context.probing else None
        ctx.call = call
        call.handle.to(weight.device)
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        # What saved-tensor hooks (activation offloading, torch's own recomputation) hand back is not the parameter,
        # which alone carries main_grad.
        ctx.parameter = weight
        total = _gather(x, call.tp_group) if call.sequence_parallel else x
        y = call.backend.fprop(total.reshape(-1, total.shape[-1]), weight, ctx.formats[0])
        y = y.view(*total.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Any, None]:
        """dgrad, its reduction, and wgrad accumulated into ``main_grad`` while that reduction runs."""
        grad_output = grad_outputs[0]
        x, weight = ctx.saved_tensors
        call: LinearCall = ctx.call
        _, dgrad_format, wgrad_format = ctx.formats
        microbatch = call.handle.backwards
        call.handle.backwards += 1

        gathered, gather = x, None
        if call.sequence_parallel:
            gathered, gather = _gather_async(x, call.tp_group)
        g = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        d_local = call.backend.dgrad(g, weight, dgrad_format, **_rounding(call.handle, Gemm.DGRAD, microbatch))
        if gather is not None:
            gather.wait()

        # A recorder needs the partial input gradient as well: the reduction then works on a copy.
        d, reduction = _reduce_async(d_local.clone() if ctx.recorder else d_local, x, call)
        total = gathered.reshape(-1, gathered.shape[-1])
        grad_weight = _accumulate(call, ctx.parameter, g, total, wgrad_format, microbatch)
        grad_bias = g.sum(dim=0) if ctx.has_bias else None
        if reduction is not None:
            reduction.wait()
        if ctx.recorder is not None:
            with torch.no_grad():
                ctx.recorder.on_backward(total, weight.detach(), g, d_local, d.reshape(-1, d.shape[-1]))
        return d.view(x.shape), grad_weight, grad_bias, None


def _rounding(handle: LinearHandle, gemm: Gemm, microbatch: int) -> dict[str, Any]:
    """Key of stochastic rounding of G: counters only, so that recomputation and resharding draw the same bits."""
    context = handle.context
    global_microbatch = microbatch * context.dp_size + context.dp_rank
    return {
        "seed": derive_seed(context.seed, context.step, global_microbatch, handle.index, GEMM_INDEX[gemm]),
        "cols": handle.out_features,
    }


def _accumulate(
    call: LinearCall, weight: torch.Tensor, g: torch.Tensor, x: torch.Tensor, fmt: Format, microbatch: int
) -> torch.Tensor | None:
    """wgrad. With DDP it goes straight into FP32 ``main_grad`` (never through a bf16 tensor); without, it is returned.

    Returns what autograd needs: a dummy where ``main_grad`` has it already, because DDP under overlap_grad_reduce
    insists on a gradient.
    """
    key = _rounding(call.handle, Gemm.WGRAD, microbatch)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return call.backend.wgrad(g, x, fmt, out=None, **key).to(weight.dtype)
    call.backend.wgrad(g, x, fmt, out=main_grad, **key)
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


def _reduce_async(d: torch.Tensor, x: torch.Tensor, call: LinearCall) -> tuple[torch.Tensor, Any]:
    """Start the reduction of the input gradient d [T, K] that the layer's parallelism asks for."""
    if call.sequence_parallel:
        shard = torch.empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=d.dtype, device=d.device)
        return shard, dist.reduce_scatter_tensor(shard, d, group=call.tp_group, async_op=True)
    if call.allreduce_dgrad:
        return d, dist.all_reduce(d, group=call.tp_group, async_op=True)
    return d, None
