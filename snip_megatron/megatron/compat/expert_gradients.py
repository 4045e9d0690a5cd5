"""Tells DDP that the gradients of a linear of all experts are complete, without a pass of autograd for every expert."""

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from snip_megatron.layers.context import LinearHandle
from snip_megatron.megatron.compat.versions import check_signature

check_signature(_ParamAndGradBucketGroup.register_grad_ready, "self", "param", "force_all_reduce")


def tell_ddp_of_experts(chunks: Sequence[torch.nn.Module]) -> None:
    """Let the grouped linears of model chunks tell DDP themselves, where their weights accumulate into ``main_grad``.

    Others, and those that delay wgrad, whose module tells DDP later, leave it to autograd.
    """
    for chunk in chunks:
        for module in chunk.modules():
            handles: Sequence[LinearHandle] = getattr(module, "snip_experts", ())
            weights = [handle.weight for handle in handles]
            if isinstance(chunk, DistributedDataParallel) and handles and not handles[0].delays:
                known = all(hasattr(each, "main_grad") and each in chunk.param_to_bucket_group for each in weights)
                module.snip_told = _told(chunk, weights) if known else None  # type: ignore[assignment]


def _told(ddp: DistributedDataParallel, weights: Sequence[Tensor]) -> Callable[[], None]:
    """Return what the hooks of DDP do for ``weights`` whose ``main_grad`` is complete."""
    pairs = [(ddp.param_to_bucket_group[weight], weight) for weight in weights]

    def told() -> None:
        if ddp.ddp_config.overlap_grad_reduce:
            for group, weight in pairs:
                group.register_grad_ready(weight, ddp.force_all_reduce)

    return told
