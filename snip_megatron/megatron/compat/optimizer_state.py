"""One parameter's optimizer state on this rank, whichever of Megatron's optimizers holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MixedPrecisionOptimizer

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat.versions import check_signature
from snip_megatron.statistics.drift import AdamWState

check_signature(
    DistributedOptimizer._get_main_param_and_optimizer_states,
    ("self", "model_param"),
    "DistributedOptimizer._get_main_param_and_optimizer_states",
)
check_signature(
    DistributedOptimizer._get_model_param_range_map,
    ("self", "param"),
    "DistributedOptimizer._get_model_param_range_map",
)


@dataclass(frozen=True)
class OptimizerShard:
    """Elements [start, end) of a flattened local parameter whose optimizer state this rank holds.

    Attributes:
        start, end: the range.
        main_param: fp32 [end − start], what the optimizer updates. A view where the optimizer keeps fp32 values.
        exp_avg, exp_avg_sq: fp32 [end − start]; None before the first step.
        step: steps this parameter has taken.
        lr, beta1, beta2, eps, weight_decay: of its parameter group, now.
    """

    start: int
    end: int
    main_param: torch.Tensor
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class HeldState:
    """What this rank holds of one parameter in the optimizer behind Megatron's.

    Attributes:
        start, end: range in the flattened local parameter.
        owner: the torch optimizer.
        group: its parameter group.
        inner: the tensor it steps.
        main: fp32 [end − start], the values it updates.
        state: its state of that tensor; empty before the first step.
    """

    start: int
    end: int
    owner: torch.optim.Optimizer
    group: dict[str, Any]
    inner: torch.Tensor
    main: torch.Tensor
    state: dict[str, Any]


def held_state(optimizer: Any, param: torch.nn.Parameter) -> HeldState | None:
    """The part of ``param``'s state on this rank; None if another rank holds all of it, or it is frozen.

    ``optimizer`` is what Megatron's ``train_step`` gets: distributed, fp32, mixed-precision, or a chain of these.
    Raises SnipError on any other.
    """
    for part in inner_optimizers(optimizer):
        held = _distributed(part, param) if isinstance(part, DistributedOptimizer) else _whole(part, param)
        if held is not None:
            return held
    return None


def optimizer_shards(optimizer: Any, param: torch.nn.Parameter) -> OptimizerShard | None:
    """As :func:`held_state`, of Adam or AdamW. Raises SnipError if the optimizer has no first and second moment."""
    held = held_state(optimizer, param)
    return None if held is None else _shard(held)


def adamw_state(optimizer: Any, param: torch.nn.Parameter) -> AdamWState | None:
    """As :func:`optimizer_shards`, as the drift computation takes it; None also before the first step."""
    shard = optimizer_shards(optimizer, param)
    if shard is None or shard.exp_avg is None or shard.exp_avg_sq is None:
        return None
    return AdamWState(
        start=shard.start,
        end=shard.end,
        exp_avg=shard.exp_avg,
        exp_avg_sq=shard.exp_avg_sq,
        step=shard.step,
        beta1=shard.beta1,
        beta2=shard.beta2,
        eps=shard.eps,
    )


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers behind a chain, without those that have nothing to optimize on this rank."""
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
    # Upstream's accessor undoes the scaling of reduced-precision states; it cannot be asked before the first step.
    tensors = optimizer._get_main_param_and_optimizer_states(param) if state else {"param": inner}
    main = tensors["param"]
    if main is None or main.dtype != torch.float32 or main.numel() != range_.end - range_.start:
        # fp16 main parameters, or Transformer Engine's 16-bit remainders: the model's own values stand in.
        main = param.detach().view(-1)[range_.start : range_.end].float()
    return HeldState(range_.start, range_.end, optimizer.optimizer, group, inner, main, {**state, **tensors})


def _whole(optimizer: Any, param: torch.nn.Parameter) -> HeldState | None:
    inner = getattr(param, "main_param", None)
    inner = param if inner is None else inner
    for group in optimizer.optimizer.param_groups:
        if any(candidate is inner for candidate in group["params"]):
            state = optimizer.optimizer.state.get(inner, {})
            return HeldState(0, inner.numel(), optimizer.optimizer, group, inner, inner, state)
    return None


def _shard(held: HeldState) -> OptimizerShard:
    group, state = held.group, held.state
    if "betas" not in group:
        raise SnipError("the optimizer keeps no second moment (no betas); SNIP's weight divergence needs Adam or AdamW")
    moments = [state.get(name) for name in ("exp_avg", "exp_avg_sq")]
    exp_avg, exp_avg_sq = (None if m is None else flat(m) for m in moments)
    # torch counts steps beside the moments, Apex and Transformer Engine in the group.
    step = state.get("step", group.get("step", 0)) if exp_avg is not None else 0
    return OptimizerShard(
        start=held.start,
        end=held.end,
        main_param=held.main.detach().reshape(-1),
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        step=int(step),
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Flattened, in float32 or what is more precise."""
    return tensor.detach().reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32))
