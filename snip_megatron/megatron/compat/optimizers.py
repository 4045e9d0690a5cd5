"""Builds the next update of a parameter from its state in any of Megatron's optimizers."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MixedPrecisionOptimizer
from torch.distributed.tensor import DTensor

from snip_megatron.megatron.compat.sharding import held_range, local
from snip_megatron.megatron.compat.versions import check_signature
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.updates import AdamWState, LionState, MuonState, SgdState, Update, flat

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


NEEDS_PACKAGE = ("lion", "muon")
"""Values of ``--optimizer`` that need :data:`PACKAGE`."""

PACKAGE = "emerging-optimizers"


def update_of(optimizer: Any, param: torch.nn.Parameter, steps: int) -> Update | None:
    """Return the update that the next step makes to this rank's shard of ``param``.

    Returns None if other ranks hold its whole state, or if Adam has not stepped yet. Raises SnipError if the optimizer
    is not one of :data:`SUPPORTED_OPTIMIZERS`, or is Adam with coupled weight decay. ``steps`` is the number of
    training steps done, for optimizers that do not count them.
    """
    held = held_state(optimizer, param)
    if held is None:
        return None
    make = next((m for known, m in _MAKERS.items() if known in _kinds(held.owner)), None)
    if make is None:
        raise SnipError(
            f"optimizer {type(held.owner).__name__}: its update is not known; weight divergence supports --optimizer"
            f" {', '.join(SUPPORTED_OPTIMIZERS)}; --snip-estimator fisher needs none"
        )
    return make(param, held, steps)


def has_package() -> bool:
    """Whether :data:`PACKAGE`, which has Lion and Muon, can be imported."""
    return importlib.util.find_spec("emerging_optimizers") is not None


def _kinds(owner: torch.optim.Optimizer) -> set[str]:
    """Return the names of the optimizer's classes. Adaptive Muon keeps a second moment and does not count as Muon.

    An optimizer of which the host holds a part is of the class that updates this part.
    """
    names = {cls.__name__ for cls in getattr(owner, "cpu_optimizer_cls", type(owner)).__mro__}
    return names - {"TensorParallelMuon"} if any("AdaptiveMuon" in name for name in names) else names


def _adam(param: torch.nn.Parameter, held: HeldState, steps: int) -> Update | None:
    group, state = held.group, held.state
    # torch says in the parameter group how weights decay, Apex and Transformer Engine in the optimizer.
    decoupled = group.get("decoupled_weight_decay", getattr(held.owner, "adam_w_mode", True))
    if group.get("weight_decay") and not decoupled:
        raise SnipError(
            "the optimizer adds weight decay to gradients (decoupled_weight_decay=False): weight divergence knows the"
            " update of AdamW; leave it out, or use --snip-estimator fisher"
        )
    if hasattr(held.owner, "sub_optimizers"):  # they count steps, in groups of their own
        group = {**group, "step": steps}
    return AdamWState.of(group, state, held.start, held.end)


def _sgd(param: torch.nn.Parameter, held: HeldState, steps: int) -> Update:
    return SgdState.of(held.group, held.state, held.start, held.end, steps)


def _lion(param: torch.nn.Parameter, held: HeldState, steps: int) -> Update:
    beta1, beta2 = held.group["betas"]
    average = held.state.get("exp_avg")
    return LionState(
        start=held.start,
        end=held.end,
        exp_avg=flat(torch.zeros_like(held.main) if average is None else average),
        step=0 if average is None else steps,
        beta1=float(beta1),
        beta2=float(beta2),
    )


def _muon(param: torch.nn.Parameter, held: HeldState, steps: int) -> Update:
    owner: Any = held.owner
    if held.start != 0 or held.end != param.numel():
        raise SnipError("Muon orthogonalises whole matrices, and this rank holds a part of one; SNIP cannot follow it")
    buffer = held.state.get("momentum_buffer")
    return MuonState(
        start=0,
        end=held.end,
        shape=(int(param.shape[0]), int(param.shape[1])),
        momentum_buffer=flat(torch.zeros_like(held.main) if buffer is None else buffer),
        step=0 if buffer is None else steps,
        momentum=float(held.group["momentum"]),
        nesterov=bool(owner.nesterov),
        orthogonalize=_orthogonalize(owner, held.inner, held.group),
    )


def _orthogonalize(owner: Any, inner: torch.Tensor, group: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the optimizer's own orthogonalisation, with matrix products in full float32 precision."""
    arguments = {key: value for key, value in group.items() if key != "params"}

    def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad():
                result: torch.Tensor = owner.orthogonalize(inner, matrix, **arguments)
        finally:
            torch.set_float32_matmul_precision(precision)
        return result

    return orthogonalize


_Maker = Callable[[torch.nn.Parameter, HeldState, int], Update | None]

# Keyed by class name, because torch, Apex and Transformer Engine have different classes with the same update rule.
_MAKERS: Mapping[str, _Maker] = {
    "Adam": _adam,
    "AdamW": _adam,
    "FusedAdam": _adam,
    "SGD": _sgd,
    "FusedSGD": _sgd,
    "Lion": _lion,
    "TensorParallelMuon": _muon,
}

SUPPORTED_OPTIMIZERS = ("adam", "sgd", "lion", "muon")
"""Values of ``--optimizer`` for which weight divergence is implemented."""
