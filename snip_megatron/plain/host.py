"""A plain torch loop as a host of SNIP's probes: in one process, or data parallel by DDP or ``fully_shard``."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from snip_megatron.plain.structure import Places
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.host import Change, Chunk, Host, LocalSink, StreamSegment
from snip_megatron.sensitivity.recorder import TokenShard
from snip_megatron.sensitivity.reduction import ProbeGroups, group_size
from snip_megatron.sensitivity.updates import AdamWState, SgdState, Update

_SUPPORTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
Loss = Callable[[], torch.Tensor]


def make_host(places: Places, device: torch.device) -> Host:
    """Return the host of a loop. All processes hold the same model, and each a share of the tokens. Collective."""
    first = places.blocks[0]

    def enter(change: Change) -> RemovableHandle:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = "" if args else next(iter(kwargs))
            stream = change(args[0] if args else kwargs[name])
            if torch.is_grad_enabled() and not stream.requires_grad:  # all embeddings are frozen
                stream = stream.detach().requires_grad_()
            return ((stream, *args[1:]), kwargs) if args else ((), {**kwargs, name: stream})

        return first.register_forward_pre_hook(hook, with_kwargs=True)

    alone = dist.new_subgroups(1)[0] if dist.is_initialized() else None  # type: ignore[no-untyped-call]
    return Host(
        groups=ProbeGroups(tp=alone, dp=None),
        device=device,
        chunks=[Chunk([StreamSegment(places.begins, places.blocks[-1], is_last=True)], enter)],
        hidden=places.hidden,
        shard=TokenShard(rank=0, size=1, reports=True),
        sinks=tuple(row for row, _ in places.sinks),
        local_sinks=[LocalSink(i, weight) for i, (_, weight) in enumerate(places.sinks)],
        is_recomputing=in_backward,
        full_tensor=whole,
    )


def in_backward() -> bool:
    """Return whether a backward pass is running, in which activation checkpointing runs forwards again."""
    return torch._C._current_graph_task_id() != -1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be sharded over ranks. Collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass
class PlainStep:
    """A training step as :class:`snip_megatron.runtime.host.HostStep`. Its probe runs the ``loss`` of the first batch.

    ``microbatches`` are the batches whose gradients one optimizer step adds up, ``transposed`` ids of the weights that
    are stored as [in, out].
    """

    step: int
    microbatches: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    transposed: Collection[int]
    loss: Loss
    _restart: Callable[[], None] = lambda: None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore gradients, buffers and random states after the passes run inside this context, which torch.compile
        does not compile.
        """
        # DDP may write the sum of a probe's gradients into the memory of those that are kept here.
        kept = [(p, p.grad, p.grad.clone() if p.grad is not None and dist.is_initialized() else p.grad)
                for p in self.model.parameters()]  # fmt: skip
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        devices = {p.device for p, _, _ in kept if p.device.type == "cuda"}
        cpu, states = torch.get_rng_state(), [(d, torch.cuda.get_rng_state(d)) for d in devices]

        @torch.no_grad()
        def restart() -> None:
            for parameter, _, _ in kept:
                parameter.grad = None
            for buffer, before in buffers:
                buffer.copy_(before)
            torch.set_rng_state(cpu)
            for device, state in states:
                torch.cuda.set_rng_state(state, device)

        self._restart = restart
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            restart()
            for parameter, gradient, content in kept:
                parameter.grad = gradient
                if gradient is not None and content is not None and content is not gradient:
                    gradient.copy_(content)

    sequences = 1  # the loss is that of a whole batch

    def run(self, microbatches: int, sequences: int) -> None:
        """Run forward and backward of the loss."""
        self._restart()
        with torch.enable_grad():
            value = self.loss()
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise SnipError("step() takes a function that returns the loss of a batch: a scalar with a gradient")
        value.backward()  # type: ignore[no-untyped-call]

    def gradient_scale(self) -> float:
        """The loss is the mean over the tokens of a rank, and that of the step the mean over ranks."""
        return 1.0 / group_size(None)

    def gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """Return the gradient of the last pass, zeros where there is none.

        DDP and fully_shard have left the mean over ranks on every rank, whose sum is that of the ranks' gradients.
        """
        if weight.grad is None:
            return self._matrix(weight, torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device))
        return self._matrix(weight, whole(weight.grad).clone())

    def _matrix(self, weight: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """Return what belongs to a weight as [out, in]."""
        return tensor.t().contiguous() if id(weight) in self.transposed else tensor

    def join_gradients(self) -> None:
        """Every process holds all of the model."""

    def update_of(self, weight: nn.Parameter) -> Update | None:
        """Return the optimizer's next update of a parameter. None if it does not train it, or if Adam has not stepped.

        Collective where the optimizer's state is sharded.
        """
        optimizer = self.optimizer
        group = next((g for g in optimizer.param_groups if any(p is weight for p in g["params"])), None)
        if group is None:
            return None
        state = {
            name: self._matrix(weight, whole(value)) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in optimizer.state.get(weight, {}).items()
        }
        if isinstance(optimizer, torch.optim.SGD):
            return SgdState.of(group, state, 0, weight.numel(), self.step)
        return AdamWState.of(group, state, 0, weight.numel())


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise SnipError if weight divergence is not implemented for the optimizer or an option of it."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, _SUPPORTED):
        raise SnipError(
            f"optimizer {kind}: weight divergence knows torch's {', '.join(kind.__name__ for kind in _SUPPORTED)};"
            " estimator='fisher' needs none of them"
        )
    for group in optimizer.param_groups:
        coupled = not isinstance(optimizer, torch.optim.AdamW) and not group.get("decoupled_weight_decay")
        for name in ("amsgrad", "maximize", *(["weight_decay"] if coupled else [])):
            if group.get(name) and not isinstance(optimizer, torch.optim.SGD):
                raise SnipError(
                    f"optimizer {kind} with {name}={group[name]}: weight divergence knows the update of AdamW without"
                    " amsgrad and maximize; leave it out, use AdamW, or estimator='fisher'"
                )
