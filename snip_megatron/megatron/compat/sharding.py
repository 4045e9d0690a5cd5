"""Process groups of a model chunk, and parameters that Megatron-FSDP or torch's ``fully_shard`` shards.

Under full sharding a rank has the whole of a parameter while its layer runs. Otherwise the module holds the rank's
shard in its place: a ``DTensor`` whose local part is a range of the flattened parameter. A shard of Megatron-FSDP is in
the optimizer's dtype, and names the whole parameter.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from snip_megatron.megatron.compat.versions import check_names
from snip_megatron.sensitivity.reduction import ProbeGroups

check_names(LanguageModule.__init__, "embd_group")  # ranks that hold the embedding's weight or the tied output's

# Since 0.20 FullyShardedDataParallel is a function, which makes an instance of one of two classes. The second one has
# other buffers: ``validate`` refuses it.
_MegatronFSDP: Any = getattr(
    mcore_fsdp_adapter, "FullyShardedDataParallelV1", mcore_fsdp_adapter.FullyShardedDataParallel
)


def process_groups(model_chunk: torch.nn.Module) -> ProbeGroups:
    """Return the groups over which statistics of ``model_chunk``, wrapped or not, are reduced.

    They are the chunk's own ``pg_collection``, or Megatron's global state if it has none. Data parallel ranks are those
    with equal weights and distinct tokens, context parallel ranks among them.
    """
    collection: Any = get_attr_wrapped_model(model_chunk, "pg_collection")
    if collection is None:
        collection = ProcessGroupCollection.use_mpu_process_groups()
    dp_cp = getattr(collection, "dp_cp", None)
    expt_tp, expt_dp = (getattr(collection, name, None) for name in ("expt_tp", "expt_dp"))
    return ProbeGroups(
        tp=collection.tp,
        dp=parallel_state.get_data_parallel_group(with_context_parallel=True) if dp_cp is None else dp_cp,
        experts=None if expt_tp is None or expt_dp is None else ProbeGroups(tp=expt_tp, dp=expt_dp),
    )


def optimizer_instance(model_chunk: torch.nn.Module) -> int:
    """Return the number of this rank's distributed optimizer. Those of other instances hold the same state."""
    group = getattr(get_attr_wrapped_model(model_chunk, "pg_collection"), "inter_dist_opt", None)
    if group is None:
        group = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    return 0 if group is None else int(group.rank())


class ShardedParameters:
    """This rank's shards of the parameters of model chunks. False if nothing is fully sharded."""

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        chunks = list(chunks)
        self._chunks = [chunk for chunk in chunks if isinstance(chunk, _MegatronFSDP)]
        self._shards: dict[torch.nn.Parameter, Any] = {
            shard.orig_param: shard
            for chunk in self._chunks
            for _, shard in chunk.param_and_grad_buffer.optimizer_named_parameters
        }
        wrapped = (chunk for chunk in chunks if isinstance(chunk, TorchFullyShardedDataParallel))
        modules = (module for chunk in wrapped for module in chunk.modules())
        self._torch_modules = [module for module in modules if isinstance(module, FSDPModule)]
        self.finish_pass()  # a validation may leave parameters whole

    def __bool__(self) -> bool:
        return bool(self._chunks or self._torch_modules)

    def of(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return the parameter that the optimizer has for ``weight``: its shard, or ``weight`` if it is not sharded."""
        shard: torch.nn.Parameter = self._shards.get(weight, weight)
        return shard

    def finish_pass(self) -> None:
        """Wait until the gradients of a pass are reduced, and put the shards back into the modules."""
        for chunk in self._chunks:
            chunk.finish_grad_sync()
        for module in self._torch_modules:
            module.reshard()

    def values(self, weight: Any) -> torch.Tensor:
        """Return ``weight`` in FP32, with zeros where it is on other ranks."""
        shard = self.of(weight)
        return _in_whole(shard, shard.data)

    def gradient(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return the sum of the gradients of all data parallel ranks in FP32, with zeros where it is on other ranks."""
        shard: Any = self.of(weight)
        decoupled = getattr(shard, "decoupled_grad", None)
        gradient = _in_whole(shard, shard.grad if decoupled is None else decoupled)
        if self._torch_modules:  # the gradients have been divided by the number of ranks
            gradient *= shard.device_mesh.size()
        elif not (model := shard._megatron_fsdp_model).calculate_per_token_loss:
            gradient *= model.dist_index.get_dp_group().size()
        return gradient


def shard_range(shard: Any) -> tuple[int, int]:
    """Return the first element of the flattened parameter that ``shard`` holds, and the end of its elements."""
    elements = getattr(shard, "megatron_fsdp_slice", None)
    if elements is not None:
        return elements.start, elements.stop
    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    start = offset[0] * math.prod(shard.shape[1:])  # fully_shard shards the first dimension
    return start, start + math.prod(shape)


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a tensor that may be sharded. Anything else is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _in_whole(shard: Any, part: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor of the whole parameter's shape, FP32, with ``part`` in the range of ``shard``."""
    parameter = getattr(shard, "orig_param", shard)
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if part is not None:
        whole[slice(*shard_range(shard))] = local_part(part).detach().reshape(-1)
    return whole.view(parameter.shape)
