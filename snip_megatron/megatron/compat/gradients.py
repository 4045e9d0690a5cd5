"""Gradients of DDP: those of experts are reported complete together, and buckets may be reduced in FP8.

``--snip-gradient-reduction fp8`` exchanges partial sums in FP8 with a scale for every 128 consecutive elements of a
rank's part, and adds them in FP32 (``numerics.quantize.partial_sums``). That is a quarter of FP32's bytes.
"""

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import megatron.core.distributed.param_and_grad_buffer as buffers
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch import Tensor
from torch.nn import functional

from snip_megatron.layers.context import LinearHandle
from snip_megatron.megatron.compat.versions import changed, check_signature
from snip_megatron.numerics.quantize import partial_sums
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels import has_kernels
from snip_megatron.precision.errors import SnipError

check_signature(_ParamAndGradBucketGroup.register_grad_ready, "self", "param", "force_all_reduce")


def report_expert_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Let grouped linears report to DDP that all their wgrads are complete, which autograd reports expert by expert.

    A pass of autograd for every expert takes the host milliseconds. Weights that do not accumulate into ``main_grad``
    keep autograd's report, as do linears that delay wgrad, whose module reports later.
    """
    for chunk in chunks:
        for module in chunk.modules():
            handles: Sequence[LinearHandle] = getattr(module, "snip_experts", ())
            weights = [handle.weight for handle in handles]
            if isinstance(chunk, DistributedDataParallel) and handles and not handles[0].delays:
                accumulate = all(hasattr(w, "main_grad") and w in chunk.param_to_bucket_group for w in weights)
                callback = _callback(chunk, weights) if accumulate else None
                module.on_wgrad_complete = callback  # type: ignore[assignment]


def _callback(ddp: DistributedDataParallel, weights: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that does what DDP's hooks do for ``weights`` whose ``main_grad`` is complete."""
    pairs = [(ddp.param_to_bucket_group[weight], weight) for weight in weights]

    def on_wgrad_complete() -> None:
        if ddp.ddp_config.overlap_grad_reduce and not is_graph_capturing():
            for group, weight in pairs:
                group.register_grad_ready(weight, ddp.force_all_reduce)

    return on_wgrad_complete


# -- reduction in FP8 ------------------------------------------------------------------------------------------
# Megatron's --ddp-reduce-scatter-with-fp32-accumulation makes bucket groups of one bucket and waits for a handle that
# finishes the sum. That argument is set, and its function is replaced.
_ARGUMENT = "ddp_reduce_scatter_with_fp32_accumulation"
_FUNCTION, _CHOSEN = "reduce_scatter_with_fp32_accumulation", "dist_reduce_scatter_func"
_ROW = 16 * TILE  # largest number of gradients in a row of a kernel
_LARGE, _LONG_ROW = 2**29, 256 * TILE  # elements of a large bucket, and of its rows


def check_gradient_reduction(args: argparse.Namespace) -> None:
    """Raise SnipError if gradients cannot be reduced in FP8 with these arguments.

    A tile of a parameter that is replicated on tensor parallel ranks may contain neighbours that are sharded, so that
    its scale differs between these ranks. That does not matter where Megatron sums the reduced gradients over these
    ranks, as it does for norms and routers under sequence parallelism. Otherwise the replicas would drift apart.
    """
    option, instances = "--snip-gradient-reduction fp8", args.num_distributed_optimizer_instances
    if (args.bf16 or args.fp16) and not args.accumulate_allreduce_grads_in_fp32:
        low = "--grad-reduce-in-bf16" if args.grad_reduce_in_bf16 else "gradients in 16 bits"
        raise SnipError(f"{low} cannot be combined with {option}, which sums gradients in FP32; leave one of them out")
    if not hasattr(args, _ARGUMENT) or not hasattr(buffers, _FUNCTION):
        raise SnipError(
            f"{option}: needs Megatron's own training loop with its --{_ARGUMENT.replace('_', '-')}; leave it out"
        )
    if not args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False):
        raise SnipError(f"{option}: only the distributed optimizer scatters gradients; add --use-distributed-optimizer")
    if instances > 1:
        raise SnipError(
            f"{option} cannot be combined with --num-distributed-optimizer-instances {instances}: Megatron has no such"
            " reduction between instances; use 1"
        )
    if args.ddp_average_in_collective:
        raise SnipError(
            f"{option} cannot be combined with --ddp-average-in-collective: gradients are summed; leave one out"
        )
    if args.data_parallel_size * args.context_parallel_size == 1:
        raise SnipError(f"{option}: there is one data parallel rank, so that gradients are not reduced; leave it out")
    if args.tensor_model_parallel_size == 1:
        return
    option += f" with --tensor-model-parallel-size {args.tensor_model_parallel_size}"
    drift = "parameters that are replicated on tensor parallel ranks would differ between them"
    if not args.sequence_parallel:
        raise SnipError(f"{option}: add --sequence-parallel; without it {drift}")
    if getattr(args, "position_embedding_type", None) == "learned_absolute":
        raise SnipError(
            f"{option} cannot be combined with --position-embedding-type learned_absolute: {drift}; use rope, or leave"
            " one out"
        )


@contextlib.contextmanager
def gradients_reduced_in_fp8(args: argparse.Namespace) -> Iterator[None]:
    """Make models that are built from ``args`` inside this context reduce gradients in FP8."""
    check_signature(getattr(buffers, _FUNCTION), "output_tensor", "input_tensor", "op", "group", "async_op")
    replaced = {_FUNCTION: _reduce_scatter, _CHOSEN: getattr(buffers, _CHOSEN)}  # the second is set by Megatron later
    with changed(args, **{_ARGUMENT: True}), changed(buffers, **replaced):
        yield


def check_reduced_models(models: Sequence[Any]) -> None:
    """Raise SnipError if a script has wrapped a model with another reduction, by a configuration of its own."""
    for model in models:
        if not getattr(getattr(model, "ddp_config", None), _FUNCTION, False):
            raise SnipError(
                "--snip-gradient-reduction: the model was wrapped without Megatron's"
                f" --{_ARGUMENT.replace('_', '-')}; give that argument too, or leave this one out"
            )


def _reduce_scatter(
    output_tensor: Tensor, input_tensor: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> SimpleNamespace | None:
    """Write the sum over ranks of this rank's part of ``input_tensor`` to ``output_tensor``, which is that part."""
    assert op == dist.ReduceOp.SUM
    finish = start_gradient_reduction(output_tensor, input_tensor, group)
    if async_op:
        return SimpleNamespace(wait=finish)  # Megatron calls wait()
    finish()
    return None


def start_gradient_reduction(shard: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Start to sum the gradients ``whole`` [ranks·n] over the data parallel ranks of ``group``.

    Returns a function that waits for the exchange and writes the sum of this rank's part to ``shard`` [n], which may be
    that part of ``whole``.
    """
    ranks, rank, n = dist.get_world_size(group), dist.get_rank(group), shard.numel()
    if ranks == 1:
        shard.copy_(whole)
        return lambda: None
    rows = as_rows(whole.view(ranks, n))
    arithmetic: Any = partial_sums
    if has_kernels(rows):
        from snip_megatron.numerics.quantize.kernels import partial_sums as arithmetic
    sent = arithmetic.pack_partial(rows)
    received = tuple(torch.empty_like(t) for t in sent)
    pairs = zip(received, sent, strict=True)
    works = [dist.all_to_all_single(out, t, group=group, async_op=True) for out, t in pairs]

    def finish() -> None:
        for work in works:
            work.wait()
        elements, scales = (t.view(ranks, -1, t.shape[1]) for t in received)
        local = rows.view(ranks, -1, rows.shape[1])[rank]
        shard.copy_(arithmetic.add_partials(elements, scales, local, rank).view(-1)[:n])

    return finish


def as_rows(parts: Tensor) -> Tensor:
    """Return the parts [ranks, n] of gradients as a matrix of whole tiles whose rows end where parts end.

    Long rows suit the kernels, and tiles are the same for any length. A launch has at most 65535 programs of 128 rows,
    so that a large bucket needs long rows. The parts are copied if they must be padded.
    """
    unit, longest = (TILE, _ROW) if parts.numel() < _LARGE else (_LONG_ROW, _LONG_ROW)
    if padding := -parts.shape[1] % unit:
        parts = functional.pad(parts, (0, padding))
    return parts.view(-1, math.gcd(parts.shape[1], longest))
