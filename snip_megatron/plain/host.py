"""A plain torch loop as a host of SNIP's probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from snip_megatron.errors import SnipError
from snip_megatron.optimizers.updates import AdamWState, SgdState, Update
from snip_megatron.plain.structure import Structure
from snip_megatron.runtime.host import Change, Chunk, Host, LocalSink
from snip_megatron.statistics.boundaries import TokenShard
from snip_megatron.statistics.reduction import ProbeGroups

_SUPPORTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
Loss = Callable[[], torch.Tensor]


def make_host(structure: Structure) -> Host:
    """Return the host of a loop in one process."""
    first = structure.blocks[0].module

    def enter(change: Change) -> RemovableHandle:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = "" if args else next(iter(kwargs), "")
            stream = args[0] if args else kwargs.get(name)
            if not isinstance(stream, torch.Tensor) or stream.shape[-1] != structure.hidden:
                raise SnipError("the first argument of a block must be the residual stream")
            stream = change(stream)
            if not stream.requires_grad:  # all embeddings are frozen
                stream = stream.detach().requires_grad_()
            return ((stream, *args[1:]), kwargs) if args else ((), {**kwargs, name: stream})

        return first.register_forward_pre_hook(hook, with_kwargs=True)

    return Host(
        groups=ProbeGroups(tp=None, dp=None),
        device=next(first.parameters()).device,
        chunks=[Chunk(structure.blocks, enter)],
        layers=len(structure.blocks),
        hidden=structure.hidden,
        shard=TokenShard(rank=0, size=1, reports=True),
        sinks=tuple(row for row, _ in structure.sinks),
        local_sinks=[LocalSink(i, weight) for i, (_, weight) in enumerate(structure.sinks)],
    )


class PlainStep:
    """A training step as :class:`snip_megatron.runtime.host.HostStep`. Its probe runs the loss of one batch.

    Args:
        microbatches: batches whose gradients one optimizer step adds up.
        model, optimizer: the model and its optimizer.
        step: number of the step.
        loss: returns the mean token loss of the first batch.
    """

    def __init__(
        self, microbatches: int, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: Loss
    ) -> None:
        self.step, self.microbatches = step, microbatches
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._restart: Callable[[], None] = lambda: None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore gradients, buffers and random states after the passes run inside this context."""
        gradients = [(p, p.grad) for p in self._model.parameters()]
        buffers = [(b, b.clone()) for b in self._model.buffers()]
        devices = {p.device for p, _ in gradients if p.device.type == "cuda"}
        cpu, states = torch.get_rng_state(), [(d, torch.cuda.get_rng_state(d)) for d in devices]

        @torch.no_grad()
        def restart() -> None:
            for parameter, _ in gradients:
                parameter.grad = None
            for buffer, before in buffers:
                buffer.copy_(before)
            torch.set_rng_state(cpu)
            for device, state in states:
                torch.cuda.set_rng_state(state, device)

        self._restart = restart
        try:
            yield
        finally:
            restart()
            for parameter, gradient in gradients:
                parameter.grad = gradient

    @property
    def sequences(self) -> int:
        """1, because the loss is that of a whole batch."""
        return 1

    def run(self, microbatches: int, sequences: int) -> None:
        """Run forward and backward of the loss."""
        self._restart()
        with torch.enable_grad():
            value = self._loss()
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise SnipError("step() takes a function that returns the loss of a batch: a scalar with a gradient")
        value.backward()  # type: ignore[no-untyped-call]

    def gradient_scale(self) -> float:
        """The loss is the mean over tokens."""
        return 1.0

    def gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """Return the gradient of the last pass, zeros where there is none."""
        return torch.zeros_like(weight) if weight.grad is None else weight.grad

    def join_gradients(self) -> None:
        """One process holds all of a gradient."""

    def update_of(self, weight: nn.Parameter) -> Update | None:
        """Return the optimizer's next update of a parameter. None if it does not train it, or if Adam has not stepped.

        Raises:
            SnipError: weight divergence is not implemented for the optimizer or an option of it.
        """
        optimizer = self._optimizer
        if not isinstance(optimizer, _SUPPORTED):
            raise SnipError(
                f"optimizer {type(optimizer).__name__}: weight divergence knows torch's"
                f" {', '.join(kind.__name__ for kind in _SUPPORTED)}; estimator='fisher' needs none of them"
            )
        group = next((g for g in optimizer.param_groups if any(p is weight for p in g["params"])), None)
        if group is None:
            return None
        state = optimizer.state.get(weight, {})
        if isinstance(optimizer, torch.optim.SGD):
            return SgdState.of(group, state, 0, weight.numel(), self.step)
        _check_adam(optimizer, group)
        return AdamWState.of(group, state, 0, weight.numel())


def _check_adam(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    coupled = not isinstance(optimizer, torch.optim.AdamW) and not group.get("decoupled_weight_decay")
    for name in ("amsgrad", "maximize", *(["weight_decay"] if coupled else [])):
        if group[name]:
            raise SnipError(
                f"optimizer {type(optimizer).__name__} with {name}={group[name]}: weight divergence knows the update of"
                " AdamW without amsgrad and maximize; leave it out, use AdamW, or estimator='fisher'"
            )
