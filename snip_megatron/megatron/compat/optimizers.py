"""Builds the next update of a parameter from its state in any of Megatron's optimizers."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MixedPrecisionOptimizer
from torch.distributed.tensor import DTensor

from snip_megatron.megatron.compat.sharding import local_part, shard_range
from snip_megatron.megatron.compat.versions import check_signature
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.updates import AdamWState, LionState, MuonState, SgdState, Update, flat

check_signature(DistributedOptimizer._get_main_param_and_optimizer_states, "self", "model_param")
check_signature(DistributedOptimizer._get_model_param_range_map, "self", "param")

SUPPORTED_OPTIMIZERS = ("adam", "sgd", "lion", "muon")
"""Values of ``--optimizer`` for which weight divergence is implemented."""

NEEDS_PACKAGE = ("lion", "muon")
"""Values of ``--optimizer`` that need :data:`PACKAGE`."""

PACKAGE = "emerging-optimizers"


def has_package() -> bool:
    """Return whether :data:`PACKAGE`, which has Lion and Muon, can be imported."""
    return importlib.util.find_spec("emerging_optimizers") is not None


# -- state -----------------------------------------------------------------------------------------------------
class _LocalState(NamedTuple):
    """The part of a parameter's optimizer state on this rank.

    It is the range [start, end) of the flattened local parameter. The torch ``optimizer`` inside Megatron's updates the
    tensor ``updated`` of its parameter ``group``. The values that are updated are ``main``, fp32 [end − start], and
    ``state`` is the torch optimizer's, with moments on the device of the parameter. It is empty before the first step.
    """

    start: int
    end: int
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    updated: torch.Tensor
    main: torch.Tensor
    state: dict[str, Any]


def _local_state(optimizer: Any, param: torch.nn.Parameter) -> _LocalState | None:
    """Return the part of ``param``'s optimizer state on this rank.

    Returns None if the parameter is frozen or if other ranks hold its whole state. Raises SnipError if the optimizer is
    neither distributed, fp32 or mixed precision nor a chain of these.
    """
    for part in _inner_optimizers(optimizer):
        sharded = isinstance(part, DistributedOptimizer) and not part.ddp_config.use_megatron_fsdp
        state = _state_in_buffers(part, param) if sharded else _state_of_parameter(part, param)
        if state is not None:
            return state
    return None


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Iterate over the optimizers of a chain, without those that have nothing to optimize on this rank."""
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from _inner_optimizers(part)
    elif not isinstance(optimizer, DistributedOptimizer | MixedPrecisionOptimizer | FP32Optimizer):
        raise SnipError(f"optimizer {type(optimizer).__name__}: not one that SNIP can read; use --optimizer adam")
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def _state_in_buffers(optimizer: Any, param: torch.nn.Parameter) -> _LocalState | None:
    """Return the state in Megatron's distributed optimizer, which shards flat buffers of parameters."""
    if param not in optimizer.model_param_gbuf_map or param not in optimizer.model_param_group_index_map:
        return None
    range_ = optimizer._get_model_param_range_map(param)["param"]
    group_index, order = optimizer.model_param_group_index_map[param]
    group = optimizer.optimizer.param_groups[group_index]
    updated = group["params"][order]
    state = optimizer.optimizer.state.get(updated, {})
    # Megatron's accessor undoes the scaling of reduced-precision states. It fails before the first step.
    tensors = optimizer._get_main_param_and_optimizer_states(param) if state else {"param": updated}
    main = tensors["param"]
    if main is None or main.dtype != torch.float32 or main.numel() != range_.end - range_.start:
        # For fp16 main parameters, or 16-bit remainders of Transformer Engine, the model's own values are used.
        main = param.detach().view(-1)[range_.start : range_.end].float()
    moments = {name: value.to(param.device) for name, value in tensors.items() if name.startswith("exp_avg")}
    return _LocalState(range_.start, range_.end, optimizer.optimizer, group, updated, main, {**state, **moments})


def _state_of_parameter(optimizer: Any, param: torch.nn.Parameter) -> _LocalState | None:
    """Return the state in an optimizer that has every parameter, or the shard of it as a ``DTensor``."""
    main = getattr(param, "main_param", None)
    updated = param if main is None else main
    for group in optimizer.optimizer.param_groups:
        if any(candidate is updated for candidate in group["params"]):
            state = {key: local_part(value) for key, value in optimizer.optimizer.state.get(updated, {}).items()}
            start, end = shard_range(updated) if isinstance(updated, DTensor) else (0, updated.numel())
            if start == end:
                return None
            return _LocalState(start, end, optimizer.optimizer, group, updated, local_part(updated), state)
    return None


# -- updates ---------------------------------------------------------------------------------------------------
def update_of(optimizer: Any, param: torch.nn.Parameter, steps: int) -> Update | None:
    """Return the update that the next step makes to this rank's shard of ``param``.

    Args:
        optimizer: The optimizer of Megatron's ``train_step``.
        param: The parameter.
        steps: Number of training steps done, for optimizers that do not count them.

    Returns:
        The update. None if other ranks hold the whole state, or if Adam has not stepped yet.

    Raises:
        SnipError: If the optimizer is not one of :data:`SUPPORTED_OPTIMIZERS`, or is Adam with coupled weight decay.
    """
    local = _local_state(optimizer, param)
    if local is None:
        return None
    make = next((make for name, make in _MAKERS.items() if name in _class_names(local.optimizer)), None)
    if make is None:
        raise SnipError(
            f"optimizer {type(local.optimizer).__name__}: its update is not known; weight divergence supports"
            f" --optimizer {', '.join(SUPPORTED_OPTIMIZERS)}; --snip-estimator fisher needs none"
        )
    return make(param, local, steps)


def _class_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of the optimizer's classes. Adaptive Muon keeps a second moment and does not count as Muon.

    An optimizer of which the host holds a part is of the class that updates this part.
    """
    names = {cls.__name__ for cls in getattr(optimizer, "cpu_optimizer_cls", type(optimizer)).__mro__}
    return names - {"TensorParallelMuon"} if any("AdaptiveMuon" in name for name in names) else names


def _adam(param: torch.nn.Parameter, local: _LocalState, steps: int) -> Update | None:
    group = local.group
    # torch says in the parameter group how weights decay, Apex and Transformer Engine in the optimizer.
    decoupled = group.get("decoupled_weight_decay", getattr(local.optimizer, "adam_w_mode", True))
    if group.get("weight_decay") and not decoupled:
        raise SnipError(
            "the optimizer adds weight decay to gradients (decoupled_weight_decay=False): weight divergence knows the"
            " update of AdamW; leave it out, or use --snip-estimator fisher"
        )
    if hasattr(local.optimizer, "sub_optimizers"):  # they count steps, in groups of their own
        group = {**group, "step": steps}
    return AdamWState.of(group, local.state, local.start, local.end)


def _sgd(param: torch.nn.Parameter, local: _LocalState, steps: int) -> Update:
    return SgdState.of(local.group, local.state, local.start, local.end, steps)


def _lion(param: torch.nn.Parameter, local: _LocalState, steps: int) -> Update:
    beta1, beta2 = local.group["betas"]
    average = local.state.get("exp_avg")
    return LionState(
        start=local.start,
        end=local.end,
        exp_avg=flat(torch.zeros_like(local.main) if average is None else average),
        step=0 if average is None else steps,
        beta1=float(beta1),
        beta2=float(beta2),
    )


def _muon(param: torch.nn.Parameter, local: _LocalState, steps: int) -> Update:
    optimizer: Any = local.optimizer
    if local.start != 0 or local.end != param.numel():
        raise SnipError("Muon orthogonalises whole matrices, and this rank holds a part of one; SNIP cannot follow it")
    buffer = local.state.get("momentum_buffer")
    arguments = {key: value for key, value in local.group.items() if key != "params"}

    def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
        """Call the optimizer's own method, with matrix products in full float32 precision."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad():
                return optimizer.orthogonalize(local.updated, matrix, **arguments)  # type: ignore[no-any-return]
        finally:
            torch.set_float32_matmul_precision(precision)

    return MuonState(
        start=0,
        end=local.end,
        shape=(int(param.shape[0]), int(param.shape[1])),
        momentum_buffer=flat(torch.zeros_like(local.main) if buffer is None else buffer),
        step=0 if buffer is None else steps,
        momentum=float(local.group["momentum"]),
        nesterov=bool(optimizer.nesterov),
        orthogonalize=orthogonalize,
    )


# Keyed by class name, because torch, Apex and Transformer Engine have different classes with the same update rule.
_MAKERS: Mapping[str, Callable[[torch.nn.Parameter, _LocalState, int], Update | None]] = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam"), _adam),
    **dict.fromkeys(("SGD", "FusedSGD"), _sgd),
    "Lion": _lion,
    "TensorParallelMuon": _muon,
}
