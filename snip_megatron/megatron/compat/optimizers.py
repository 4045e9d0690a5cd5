"""Reads the state of a parameter in any of Megatron's optimizers."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MixedPrecisionOptimizer
from torch.distributed.tensor import DTensor

from snip_megatron.megatron.compat.sharding import local_part, shard_range
from snip_megatron.megatron.compat.versions import check_signature
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.update_error import AdamWState

check_signature(DistributedOptimizer._get_main_param_and_optimizer_states, "self", "model_param")
check_signature(DistributedOptimizer._get_model_param_range_map, "self", "param")

State = tuple[dict[str, Any], dict[str, Any], int, int]
"""Parameter group and state of a parameter in torch's optimizer inside Megatron's, with moments on the parameter's
device, and the range of the flattened local parameter that this rank holds. The state is empty before the first step.
"""


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Iterate over the optimizers of a chain, without those that have nothing to optimize on this rank."""
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from _inner_optimizers(part)
    elif not isinstance(optimizer, DistributedOptimizer | MixedPrecisionOptimizer | FP32Optimizer):
        raise SnipError(f"optimizer {type(optimizer).__name__}: not one that SNIP can read; use --optimizer adam")
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def _state_in_buffers(optimizer: Any, param: torch.nn.Parameter) -> State | None:
    """Return the state in Megatron's distributed optimizer, which shards flat buffers of parameters."""
    if param not in optimizer.model_param_gbuf_map or param not in optimizer.model_param_group_index_map:
        return None
    range_ = optimizer._get_model_param_range_map(param)["param"]
    group_index, order = optimizer.model_param_group_index_map[param]
    group = optimizer.optimizer.param_groups[group_index]
    state = optimizer.optimizer.state.get(group["params"][order], {})
    # Megatron's accessor undoes the scaling of reduced-precision states. It fails before the first step.
    tensors = optimizer._get_main_param_and_optimizer_states(param) if state else {}
    moments = {name: value.to(param.device) for name, value in tensors.items() if name.startswith("exp_avg")}
    return group, {**state, **moments}, range_.start, range_.end


def _state_of_parameter(optimizer: Any, param: torch.nn.Parameter) -> State | None:
    """Return the state in an optimizer that has every parameter, or the shard of it as a ``DTensor``."""
    main = getattr(param, "main_param", None)
    updated = param if main is None else main
    for group in optimizer.optimizer.param_groups:
        if any(candidate is updated for candidate in group["params"]):
            state = {key: local_part(value) for key, value in optimizer.optimizer.state.get(updated, {}).items()}
            start, end = shard_range(updated) if isinstance(updated, DTensor) else (0, updated.numel())
            return None if start == end else (group, state, start, end)
    return None


def main_parameter(optimizer: Any, param: torch.nn.Parameter) -> tuple[torch.Tensor, int, int] | None:
    """Return the FP32 values that the optimizer updates for ``param``, and the range of elements that they cover.

    Returns None if this rank has none, or has them in another form.
    """
    main = getattr(param, "main_param", None)
    if not isinstance(main, torch.Tensor) or isinstance(main, DTensor) or main.dtype is not torch.float32:
        return None
    start, end = 0, param.numel()
    if getattr(param, "main_param_sharded", False):
        parts = [each for each in _inner_optimizers(optimizer) if param in getattr(each, "model_param_gbuf_map", ())]
        if not parts:
            return None
        bounds = parts[0]._get_model_param_range_map(param)["param"]
        start, end = bounds.start, bounds.end
    return (main, start, end) if main.numel() == end - start else None


_ADAM = {"Adam", "AdamW", "FusedAdam"}
"""Names of classes, because torch, Apex and Transformer Engine have different classes with the same update rule."""


def update_of(optimizer: Any, param: torch.nn.Parameter, steps: int) -> AdamWState | None:
    """Return the state from which the next step updates this rank's shard of ``param``.

    Args:
        optimizer: The optimizer of Megatron's ``train_step``.
        param: The parameter.
        steps: Number of training steps done, for optimizers on the host, which count in groups of their own.

    Returns:
        The state. None if other ranks hold all of it, or if Adam has not stepped yet.

    Raises:
        SnipError: If the optimizer is not Adam with decoupled weight decay, or Megatron's around it is none that is
            known.
    """
    for part in _inner_optimizers(optimizer):
        sharded = isinstance(part, DistributedOptimizer) and not part.ddp_config.use_megatron_fsdp
        state = _state_in_buffers(part, param) if sharded else _state_of_parameter(part, param)
        if state is not None:
            return _adamw(part.optimizer, *state, steps)
    return None


def _adamw(
    optimizer: Any, group: dict[str, Any], state: dict[str, Any], start: int, end: int, steps: int
) -> AdamWState | None:
    # An optimizer of which the host holds a part is of the class that updates this part.
    kind = getattr(optimizer, "cpu_optimizer_cls", type(optimizer))
    if _ADAM.isdisjoint(each.__name__ for each in kind.__mro__):
        raise SnipError(
            f"optimizer {type(optimizer).__name__}: its update is not known; weight divergence supports"
            " --optimizer adam; --snip-estimator fisher needs none"
        )
    # torch says in the parameter group how weights decay, Apex and Transformer Engine in the optimizer.
    decoupled = group.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", True))
    if group.get("weight_decay") and not decoupled:
        raise SnipError(
            "the optimizer adds weight decay to gradients (decoupled_weight_decay=False): weight divergence knows the"
            " update of AdamW; leave it out, or use --snip-estimator fisher"
        )
    if hasattr(optimizer, "sub_optimizers"):
        group = {**group, "step": steps}
    return AdamWState.of(group, state, start, end)
