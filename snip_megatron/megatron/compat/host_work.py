"""Host work that Megatron does for every parameter of a step, and that can be done once or left out.

**Copies** between the distributed optimizer and the model run for all parameters in one launch. Megatron copies the
FP32 parameters into the model one by one, and takes a view of every gradient. With a thousand weights of experts this
takes the host 27 ms a step, longer than the GPU takes for Adam. The results are the same, bit for bit.

**Buckets** that no other rank shares need no collectives. Where the experts of a layer stand on one data parallel rank
each, and on one GPU, Megatron still starts a gather and a reduction over one rank for every bucket, which change
nothing, and asks every parameter whether it is quantised.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import megatron.core.distributed.param_and_grad_buffer as buffers
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from snip_megatron.megatron.compat.versions import check_names, check_signature, nothing

check_signature(DistributedOptimizer._copy_main_params_to_model_params, "self")
check_signature(DistributedOptimizer._copy_model_grads_to_main_grads, "self")
check_signature(DistributedOptimizer._get_model_param_range_map, "self", "param")
_COLLECTIVES = ("dist_all_gather_func", "dist_reduce_scatter_func")
check_names(buffers, "_coalescing_manager", "_param_uses_quantized_storage", *_COLLECTIVES)
check_names(_ParamAndGradBucketGroup.start_param_sync, "_coalescing_manager", _COLLECTIVES[0])
check_names(_ParamAndGradBucketGroup.start_grad_sync, "_coalescing_manager", _COLLECTIVES[1])
check_signature(_ParamAndGradBucketGroup._post_param_sync, "self")

_DONE = SimpleNamespace(wait=nothing)


# -- copies ----------------------------------------------------------------------------------------------------
def fuse_copies(optimizer: Any) -> None:
    """Replace the copies of the distributed optimizers in ``optimizer``, where they have Megatron's plain form.

    Parameters in FP8, Megatron-FSDP, and optimizers that hold the main parameters themselves have copies of their own.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and _is_plain(part):
            copies = _Copies(part)
            part._copy_main_params_to_model_params = copies.update_model
            part._copy_model_grads_to_main_grads = copies.take_gradients


def _is_plain(optimizer: Any) -> bool:
    ddp, config = optimizer.ddp_config, optimizer.config
    quantized = getattr(ddp, "fp8_param_gather", False) or getattr(ddp, "fp4_param_gather", False)
    has_copies = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 or config.optimizer_cpu_offload
    return not (optimizer.is_stub_optimizer or ddp.use_megatron_fsdp or quantized or has_copies)


class _Copies:
    """The copies of one optimizer. Megatron's own functions run where tensors are not as they are expected.

    The views that are copied are made once, and again when a tensor that they depend on is another one.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._copy_params = optimizer._copy_main_params_to_model_params
        self._copy_grads = optimizer._copy_model_grads_to_main_grads
        self._params: tuple[list[Any], list[tuple[list[Tensor], list[Tensor]]]] = ([], [])
        self._grads: tuple[list[Any], list[Tensor]] = ([], [])

    @torch.no_grad()
    def update_model(self) -> None:
        """Copy this rank's shard of the FP32 parameters into the buffers of the model."""
        pairs = self._pairs()
        mains = [main for main, _ in pairs]
        buffers = [bucket.param_data for buffer in self._optimizer.buffers for bucket in buffer.buckets]
        if any(main.device != buffers[0].device for main in mains):
            self._copy_params()
            return
        sources = [*mains, *buffers]
        if not _same(sources, self._params[0]):
            self._params = sources, self._groups(pairs)
        for shards, masters in self._params[1]:
            torch._foreach_copy_(shards, masters)

    def take_gradients(self) -> None:
        """Let the FP32 parameters have this rank's shard of ``main_grad`` as their gradients."""
        pairs = self._pairs()
        grads: list[Any] = [getattr(param, "main_grad", None) for _, param in pairs]
        if any(grad is None or grad.dtype is not torch.float32 for grad in grads):
            self._copy_grads()
            return
        if not _same(grads, self._grads[0]):
            shards = [self._shard(grad, param, "param") for grad, (_, param) in zip(grads, pairs, strict=True)]
            self._grads = grads, shards
        for (main, _), shard in zip(pairs, self._grads[1], strict=True):
            main.grad = shard

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return this rank's shards of the FP32 parameters, each with its parameter of the model."""
        optimizer = self._optimizer
        kinds = (
            (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
            (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
        )
        return [pair for kind in kinds for groups in zip(*kind, strict=True) for pair in zip(*groups, strict=True)]

    def _groups(self, pairs: list[tuple[Any, Any]]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return the shards of the model and of the optimizer, apart by the dtype of the model's."""
        groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for main, param in pairs:
            index, _, bucket = self._optimizer.model_param_gbuf_map[param]
            data = self._optimizer.buffers[index].buckets[bucket].param_data
            shards, masters = groups.setdefault(data.dtype, ([], []))
            shards.append(self._shard(data, param, "gbuf_world_in_bucket"))
            masters.append(main)
        return list(groups.values())

    def _shard(self, tensor: Tensor, param: Any, name: str) -> Tensor:
        """Return this rank's range of a tensor. Ranges of the name ``name`` count from its first element."""
        bounds = self._optimizer._get_model_param_range_map(param)[name]
        return tensor.view(-1)[bounds.start : bounds.end]


def _same(tensors: list[Any], before: list[Any]) -> bool:
    return len(tensors) == len(before) and all(map(operator.is_, tensors, before))


# -- buckets ---------------------------------------------------------------------------------------------------
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
