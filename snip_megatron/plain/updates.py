"""The next update of a parameter from the state of torch's optimizers."""

from __future__ import annotations

import torch

from snip_megatron.errors import SnipError
from snip_megatron.optimizers.updates import AdamWState, SgdState, Update

_SUPPORTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise SnipError if weight divergence is not implemented for the optimizer or an option of it."""
    if not isinstance(optimizer, _SUPPORTED):
        raise SnipError(
            f"optimizer {type(optimizer).__name__}: weight divergence knows torch's"
            f" {', '.join(kind.__name__ for kind in _SUPPORTED)}; estimator='fisher' needs none of them"
        )
    if isinstance(optimizer, torch.optim.SGD):
        return  # its update is linear in the gradient, so that no other option changes what an error does
    for group in optimizer.param_groups:
        coupled = not isinstance(optimizer, torch.optim.AdamW) and not group.get("decoupled_weight_decay")
        for name in ("amsgrad", "maximize", *(["weight_decay"] if coupled else [])):
            if group[name]:
                raise SnipError(
                    f"optimizer {type(optimizer).__name__} with {name}={group[name]}: weight divergence knows the"
                    " update of AdamW without amsgrad and maximize; leave it out, use AdamW, or estimator='fisher'"
                )


def update_of(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, steps: int) -> Update | None:
    """Return the update that the next step makes to ``weight``. None if the optimizer does not train it, or if Adam
    has not stepped yet.

    Args:
        optimizer: One that :func:`check_optimizer` accepts.
        weight: A parameter of the model.
        steps: Number of training steps done, which SGD does not count.
    """
    group = next((g for g in optimizer.param_groups if any(p is weight for p in g["params"])), None)
    if group is None:
        return None
    state = optimizer.state.get(weight, {})
    if isinstance(optimizer, torch.optim.SGD):
        buffer = state.get("momentum_buffer")
        return SgdState(
            start=0,
            end=weight.numel(),
            momentum_buffer=None if buffer is None else buffer.reshape(-1).float(),
            step=steps,
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
        )
    if "exp_avg" not in state:
        return None
    return AdamWState(
        start=0,
        end=weight.numel(),
        exp_avg=state["exp_avg"].reshape(-1).float(),
        exp_avg_sq=state["exp_avg_sq"].reshape(-1).float(),
        step=int(state["step"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
    )
