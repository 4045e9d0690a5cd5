"""Parameters that Megatron-FSDP or torch's ``fully_shard`` shards: a rank has the whole of one while its layer runs.

Outside of passes a module holds the rank's share in place of the parameter: a ``DTensor`` whose local part is a range
of the flattened parameter. That of Megatron-FSDP is in the optimizer's dtype, and names the whole parameter.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Shares:
    """This rank's shares of the parameters of model chunks. Empty without full sharding."""

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        chunks = list(chunks)
        self._chunks = [chunk for chunk in chunks if isinstance(chunk, FullyShardedDataParallel)]
        self._shares: dict[torch.nn.Parameter, Any] = {
            share.orig_param: share
            for chunk in self._chunks
            for _, share in chunk.param_and_grad_buffer.optimizer_named_parameters
        }
        self._by_torch = [
            module
            for chunk in chunks
            if isinstance(chunk, TorchFullyShardedDataParallel)
            for module in chunk.modules()
            if isinstance(module, FSDPModule)
        ]
        self.finish_pass()  # a validation may leave parameters whole

    def __bool__(self) -> bool:
        return bool(self._chunks or self._by_torch)

    def of(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return the parameter that the optimizer has for ``weight``: the share of it, or itself if it is none's."""
        share: torch.nn.Parameter = self._shares.get(weight, weight)
        return share

    def finish_pass(self) -> None:
        """Wait until the gradients of a pass are reduced, and leave the modules as they are between passes."""
        for chunk in self._chunks:
            chunk.finish_grad_sync()
        for module in self._by_torch:
            module.reshard()

    def values(self, weight: Any) -> torch.Tensor:
        """Return ``weight`` in FP32, with zeros where it is on other ranks."""
        share = self.of(weight)
        return _placed(share, share.data)

    def gradient(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return the sum of the gradients of all data parallel ranks in FP32, with zeros where it is on other ranks."""
        share: Any = self.of(weight)
        found = getattr(share, "decoupled_grad", None)
        found = _placed(share, share.grad if found is None else found)
        if self._by_torch:  # the gradients have been divided by the number of ranks
            found *= share.device_mesh.size()
        elif not (model := share._megatron_fsdp_model).calculate_per_token_loss:
            found *= model.dist_index.get_dp_group().size()
        return found


def held_range(share: Any) -> tuple[int, int]:
    """Return the first element of the flattened parameter that a share holds, and the end of its elements."""
    held = getattr(share, "megatron_fsdp_slice", None)
    if held is not None:
        return held.start, held.stop
    shape, offset = compute_local_shape_and_global_offset(share.shape, share.device_mesh, share.placements)
    start = offset[0] * math.prod(share.shape[1:])  # fully_shard shards the first dimension
    return start, start + math.prod(shape)


def local(tensor: Any) -> Any:
    """Return this rank's part of a tensor that may be sharded. Anything else is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placed(share: Any, part: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor of the whole parameter's shape, FP32, with ``part`` where the rank's share belongs."""
    like = getattr(share, "orig_param", share)
    whole = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    if part is not None:
        whole[slice(*held_range(share))] = local(part).detach().reshape(-1)
    return whole.view(like.shape)
