"""Replaces the reduce-scatter of gradient buckets (``--snip-gradient-reduction fp8``).

Megatron's ``--ddp-reduce-scatter-with-fp32-accumulation`` has what this takes: bucket groups of one bucket, and a
handle of its own that finishes the sum. That argument is set, and its function is replaced.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import megatron.core.distributed.param_and_grad_buffer as buffers
import torch
import torch.distributed as dist

from snip_megatron.errors import SnipError
from snip_megatron.layers.reductions import Reduction, start_gradient_reduction
from snip_megatron.megatron.compat.versions import check_signature

_ARGUMENT = "ddp_reduce_scatter_with_fp32_accumulation"
_FUNCTION, _CHOSEN = "reduce_scatter_with_fp32_accumulation", "dist_reduce_scatter_func"
_PARAMETERS = ("output_tensor", "input_tensor", "op", "group", "async_op")


def check_gradient_reduction(args: argparse.Namespace) -> None:
    """Raise SnipError if gradients cannot be reduced in FP8 with these arguments."""
    here = "--snip-gradient-reduction fp8"
    if not hasattr(args, _ARGUMENT) or not hasattr(buffers, _FUNCTION):
        raise SnipError(
            f"{here}: needs Megatron's own training loop with --{_ARGUMENT.replace('_', '-')}; leave it out"
        )
    if not args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False):
        raise SnipError(f"{here}: only the distributed optimizer scatters gradients; add --use-distributed-optimizer")
    if args.ddp_average_in_collective:
        raise SnipError(
            f"{here} cannot be combined with --ddp-average-in-collective: gradients are summed; leave one out"
        )
    if args.data_parallel_size * args.context_parallel_size == 1:
        raise SnipError(f"{here}: there is one data parallel rank, so that gradients are not reduced; leave it out")


def reduce_gradients_in_fp8(args: argparse.Namespace) -> Callable[[], None]:
    """Let models that are built from ``args`` reduce gradients in FP8. Returns a function that ends it."""
    genuine = {name: getattr(buffers, name) for name in (_FUNCTION, _CHOSEN)}
    check_signature(genuine[_FUNCTION], _PARAMETERS, f"Megatron's {_FUNCTION}")
    given = getattr(args, _ARGUMENT)
    setattr(args, _ARGUMENT, True)
    setattr(buffers, _FUNCTION, _reduce_scatter)

    def undo() -> None:
        setattr(args, _ARGUMENT, given)
        for name, function in genuine.items():
            setattr(buffers, name, function)

    return undo


class _Handle:
    """What Megatron waits for."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def wait(self) -> None:
        """Finish the sum."""
        self._reduction.result()


def _reduce_scatter(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> _Handle | None:
    """Write the sum over ranks of this rank's part of ``input_tensor`` to ``output_tensor``, which is that part."""
    assert op == dist.ReduceOp.SUM
    handle = _Handle(start_gradient_reduction(output_tensor, input_tensor, group))
    if async_op:
        return handle
    handle.wait()
    return None
