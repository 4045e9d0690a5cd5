"""Finds the optimizer state of a parameter on this rank in any of Megatron's optimizers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MixedPrecisionOptimizer
from torch.distributed.tensor import DTensor

from snip_megatron.megatron.compat.full_sharding import held_range, local
from snip_megatron.megatron.compat.versions import check_signature
from snip_megatron.precision.errors import SnipError

check_signature(DistributedOptimizer._get_main_param_and_optimizer_states, "self", "model_param")
check_signature(DistributedOptimizer._get_model_param_range_map, "self", "param")


@dataclass(frozen=True)
class HeldState:
    """The part of a parameter's optimizer state that this rank holds.

    Attributes:
        start: First element of the range in the flattened local parameter.
        owner: The torch optimizer inside Megatron's optimizer.
        inner: Tensor that the torch optimizer updates.
        main: fp32 [end − start], the values that are updated.
        state: State of ``inner`` in the torch optimizer, its moments on the device of the parameter; empty before the
            first step.
    """

    start: int
    end: int
    owner: torch.optim.Optimizer
    group: dict[str, Any]
    inner: torch.Tensor
    main: torch.Tensor
    state: dict[str, Any]


def held_state(optimizer: Any, param: torch.nn.Parameter) -> HeldState | None:
    """Return the part of ``param``'s optimizer state on this rank.

    Returns None if the parameter is frozen or if other ranks hold its whole state. Raises SnipError if the optimizer is
    of another class. The ``optimizer`` is that of Megatron's ``train_step``: distributed, fp32, mixed precision, or a
    chain of these.
    """
    for part in inner_optimizers(optimizer):
        sharded = isinstance(part, DistributedOptimizer) and not part.ddp_config.use_megatron_fsdp
        held = _distributed(part, param) if sharded else _whole(part, param)
        if held is not None:
            return held
    return None


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Iterate over the optimizers of a chain, without those that have nothing to optimize on this rank."""
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from inner_optimizers(part)
    elif not isinstance(optimizer, DistributedOptimizer | MixedPrecisionOptimizer | FP32Optimizer):
        raise SnipError(f"optimizer {type(optimizer).__name__}: not one that SNIP can read; use --optimizer adam")
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def _distributed(optimizer: Any, param: torch.nn.Parameter) -> HeldState | None:
    if param not in optimizer.model_param_gbuf_map or param not in optimizer.model_param_group_index_map:
        return None
    range_ = optimizer._get_model_param_range_map(param)["param"]
    group_index, order = optimizer.model_param_group_index_map[param]
    group = optimizer.optimizer.param_groups[group_index]
    inner = group["params"][order]
    state = optimizer.optimizer.state.get(inner, {})
    # Megatron's accessor undoes the scaling of reduced-precision states. It fails before the first step.
    tensors = optimizer._get_main_param_and_optimizer_states(param) if state else {"param": inner}
    main = tensors["param"]
    if main is None or main.dtype != torch.float32 or main.numel() != range_.end - range_.start:
        # For fp16 main parameters, or 16-bit remainders of Transformer Engine, the model's own values are used.
        main = param.detach().view(-1)[range_.start : range_.end].float()
    moments = {name: value.to(param.device) for name, value in tensors.items() if name.startswith("exp_avg")}
    return HeldState(range_.start, range_.end, optimizer.optimizer, group, inner, main, {**state, **moments})


def _whole(optimizer: Any, param: torch.nn.Parameter) -> HeldState | None:
    inner = getattr(param, "main_param", None)
    inner = param if inner is None else inner
    for group in optimizer.optimizer.param_groups:
        if any(candidate is inner for candidate in group["params"]):
            state = {key: local(value) for key, value in optimizer.optimizer.state.get(inner, {}).items()}
            start, end = held_range(inner) if isinstance(inner, DTensor) else (0, inner.numel())
            if start == end:
                return None
            return HeldState(start, end, optimizer.optimizer, group, inner, local(inner), state)
    return None
