"""``distributed-optimizer-resume``: saves and restores the step count of an optimizer whose state is sharded.

Apex and Transformer Engine store the step count in the parameter groups. torch stores it beside the moments of each
parameter, which the serialisation of Megatron's distributed optimizer handles only in part (seen in 0.19):

- ``state_dict`` asserts that an optimizer has stepped, and loading begins with a call of it.
- Under ``dp_reshardable`` loading overwrites the step with an old value, so that the run silently continues with the
  bias correction of step 0. Under ``fully_reshardable`` the step is missing, and loading ends in a KeyError.
- All parameters share one step tensor, so that each of them would advance it.
- FP32 shards are views of parameters that require gradients, and are copied into with gradients enabled.
- Under Megatron-FSDP ranks describe the state of all parameters to each other. torch creates no state for a parameter
  of which a rank has no element, so that ranks would wait for each other.

Under ``--use-torch-fsdp2`` Megatron loads tensors in place and drops the step count. torch's AdamW then ends with a
KeyError, and other optimizers start from 0. It finds the optimizer's state of a parameter by the identity of the
parameter's shard, of which ``DTensor.to_local`` returns another tensor at each call since torch 2.15, so that no
checkpoint can be saved.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing import optimizer as optimizer_states
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.training import checkpointing
from torch.distributed.tensor import DTensor

from snip_megatron.megatron.compat.sharding import local_part
from snip_megatron.megatron.compat.versions import check_names, check_signature

check_signature(DistributedOptimizer.state_dict, "self")
check_signature(DistributedOptimizer.load_state_dict, "self", "state_dict")
check_signature(DistributedOptimizer._set_main_param_and_optimizer_states, "self", "model_param", "tensors")
check_signature(DistributedOptimizer.sharded_param_state_fsdp_dtensor, "self", "is_loading")
check_signature(Float16OptimizerWithFloat16Params.sharded_state_dict, "self", "model_sharded_state_dict", "is_loading")
check_names(checkpointing, "_load_base_checkpoint")
check_names(optimizer_states, "to_local_if_dtensor")
_state_dict = DistributedOptimizer.state_dict
_load_state_dict = DistributedOptimizer.load_state_dict
_set_states = DistributedOptimizer._set_main_param_and_optimizer_states
_fsdp_states = DistributedOptimizer.sharded_param_state_fsdp_dtensor


def install() -> str:
    """Patch Megatron's DistributedOptimizer. Returns a description for the list printed at start."""
    DistributedOptimizer.state_dict = _complete_state_dict
    DistributedOptimizer.load_state_dict = _load_with_steps
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_without_step
    DistributedOptimizer.sharded_param_state_fsdp_dtensor = _complete_fsdp_states
    return "step counts of torch's AdamW saved and restored"


def _is_adamw(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "optimizer", None), torch.optim.AdamW)


def _step(count: float) -> torch.Tensor:
    return torch.tensor(float(count), dtype=torch.float32)


def _complete(optimizer: Any) -> None:
    """Create the state that torch would create for parameters that have not stepped.

    A parameter without elements on this rank never steps. All ranks write its step, and any of them may be the one in
    the checkpoint.
    """
    if not _is_adamw(optimizer):
        return
    states = optimizer.optimizer.state
    step = max((float(state["step"]) for state in states.values()), default=0.0)
    for parameter in (parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]):
        if not states.get(parameter) or not local_part(parameter).numel():
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            states[parameter] = {"step": _step(step), **moments}


def _complete_state_dict(self: Any) -> Any:
    _complete(self)
    return _state_dict(self)


def _complete_fsdp_states(self: Any, is_loading: bool = False) -> Any:
    _complete(self)
    return _fsdp_states(self, is_loading)


def _load_with_steps(self: Any, state_dict: Any) -> Any:
    with torch.no_grad():
        result = _load_state_dict(self, state_dict)
        if _is_adamw(self) and not self.ddp_config.use_megatron_fsdp:  # which keeps a step for each parameter
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter]["step"] = _step(group["step"])
    return result


def _set_without_step(self: Any, model_param: Any, tensors: Any) -> Any:
    # Megatron skips entries that are None. _load_with_steps restores the step from the parameter groups.
    return _set_states(self, model_param, {**tensors, "step": None} if _is_adamw(self) else tensors)


def install_for_torch_fsdp() -> str:
    """Save and restore the state under ``--use-torch-fsdp2``. Returns a description for the list printed at start."""
    read, describe = checkpointing._load_base_checkpoint, Float16OptimizerWithFloat16Params.sharded_state_dict
    loading: list[Any] = []

    def describe_and_remember(self: Any, model: Any, is_loading: bool = False, **named: Any) -> Any:
        loading.extend([self] if is_loading else [])
        return describe(self, model, is_loading, **named)

    def read_with_steps(*positional: Any, **named: Any) -> Any:
        result = read(*positional, **named)
        saved = (result[0] or {}).get("optimizer", {})
        for index, optimizer in enumerate(loading if saved else ()):
            _set_steps(optimizer.optimizer, (saved if "optimizer" in saved else saved[index])["optimizer"])
        return result

    checkpointing._load_base_checkpoint = read_with_steps
    Float16OptimizerWithFloat16Params.sharded_state_dict = describe_and_remember
    optimizer_states.to_local_if_dtensor = _shard
    return "step counts restored under --use-torch-fsdp2"


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _set_steps(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    step = saved["state"].get("common_step")
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        if "step" in saved_group:  # Transformer Engine's and Apex's
            group["step"] = saved_group["step"]
        for parameter in group["params"] if step is not None else ():
            optimizer.state[parameter]["step"] = _step(float(step))
