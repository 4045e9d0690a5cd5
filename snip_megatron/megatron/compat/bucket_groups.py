"""Work that the host can leave out for buckets of parameters that no other rank shares.

Where the experts of a layer stand on one data parallel rank each, and on one GPU, Megatron still starts a gather and a
reduction over one rank for every bucket, which change nothing, and asks every parameter whether it is quantised.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import megatron.core.distributed.param_and_grad_buffer as buffers
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from snip_megatron.megatron.compat.versions import check_names, check_signature, nothing

_COLLECTIVES = ("dist_all_gather_func", "dist_reduce_scatter_func")
check_names(buffers, "_coalescing_manager", "_param_uses_quantized_storage", *_COLLECTIVES)
check_names(_ParamAndGradBucketGroup.start_param_sync, "_coalescing_manager", _COLLECTIVES[0])
check_names(_ParamAndGradBucketGroup.start_grad_sync, "_coalescing_manager", _COLLECTIVES[1])
check_signature(_ParamAndGradBucketGroup._post_param_sync, "self")

_DONE = SimpleNamespace(wait=nothing)


def lighten_buckets(chunks: Sequence[torch.nn.Module]) -> None:
    """Leave out collectives over one rank, and what follows a gather of parameters that are not quantised."""
    _skip_collectives_of_one()
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and not chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if not any(map(buffers._param_uses_quantized_storage, group.params)):
                    group._post_param_sync = nothing


def _skip_collectives_of_one() -> None:
    if hasattr(buffers, "snip_skips"):
        return
    coalesce = buffers._coalescing_manager

    @contextmanager
    def coalescing_manager(group: Any = None, *arguments: Any, **named: Any) -> Iterator[Any]:
        if dist.get_world_size(group) == 1:
            yield _DONE
        else:
            with coalesce(group, *arguments, **named) as manager:
                yield manager

    buffers._coalescing_manager = coalescing_manager
    for name in _COLLECTIVES:
        setattr(buffers, name, _unless_alone(getattr(buffers, name)))
    buffers.snip_skips = True


def _unless_alone(collective: Any) -> Any:
    """Return a collective from or into a shard, which over one rank is the whole tensor itself."""

    def run(output: torch.Tensor, shard: torch.Tensor, *arguments: Any, group: Any = None, **named: Any) -> Any:
        if dist.get_world_size(group) == 1 and output.data_ptr() == shard.data_ptr():
            return _DONE
        return collective(output, shard, *arguments, group=group, **named)

    return run
