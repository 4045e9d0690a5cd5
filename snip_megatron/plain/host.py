"""A plain torch loop as a host of SNIP's probes: in one process, or data parallel by DDP or ``fully_shard``.

:func:`make_host` follows one forward pass to see what each linear does in its block: which norm feeds it, and whether
it writes the residual stream.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from snip_megatron.plain.model import SnipExperts, Structure
from snip_megatron.precision import LinearRow, Role
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.host import Change, Host, LocalSink, StreamReader, StreamSegment
from snip_megatron.sensitivity.recorder import TokenShard
from snip_megatron.sensitivity.reduction import ProbeGroups, group_size
from snip_megatron.sensitivity.table import SinkRow
from snip_megatron.sensitivity.update_error import AdamWState

Loss = Callable[[], torch.Tensor]


# -- the model in a forward pass -----------------------------------------------------------------------------------
@dataclass
class _Branch:
    """A branch of the residual stream: the norms that read the stream at one address, and linears in their order.

    Attention and MLP side by side are one branch.
    """

    stream: int
    norms: list[nn.Module] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)


class _Trace:
    """Follows a forward pass by hooks. ``branches`` are those of each block, ``hidden`` the width of the stream."""

    def __init__(self, structure: Structure, forward: Callable[[], object]) -> None:
        self.hidden = 0
        self.branches: list[list[_Branch]] = [[] for _ in structure.blocks]
        #: Norms that ran in this block, by the address of their output: (norm, address of its input, output).
        self._outputs: dict[int, tuple[nn.Module, int, torch.Tensor]] = {}
        with ExitStack() as stack, torch.no_grad():
            for block in structure.blocks:
                stack.callback(block.register_forward_pre_hook(self._on_block, with_kwargs=True).remove)
                for module in filter(_is_norm, block.modules()):
                    stack.callback(module.register_forward_hook(self._on_norm).remove)
            for row, module in structure.linears.items():
                hook = self._on_linear(row.id.layer, row.name)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            forward()

    def _on_block(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        stream = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(stream, torch.Tensor):
            raise SnipError("the first argument of a block must be the residual stream")
        self.hidden = stream.shape[-1]
        self._outputs.clear()

    def _on_norm(self, module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(output, torch.Tensor) and output.shape[-1] == self.hidden:
            self._outputs[output.data_ptr()] = module, args[0].data_ptr(), output

    def _on_linear(self, layer: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False)):
                raise SnipError(f"{name} is sharded while it runs: tensor parallelism needs Megatron")
            branches, x = self.branches[layer], args[0] if args else next(iter(kwargs.values()))
            norm, stream, _ = self._outputs.get(x.data_ptr(), (None, None, None))
            if name.endswith(".down_proj") and isinstance(module, SnipExperts):  # its input is inside of the module
                norm = stream = None
            if stream is not None and (not branches or branches[-1].stream != stream):
                branches.append(_Branch(stream))
            if not branches:
                raise SnipError(
                    f"{name} runs before any norm: SNIP measures blocks that begin with a norm; policy= and map= need"
                    " none"
                )
            if norm is not None and norm not in branches[-1].norms:
                branches[-1].norms.append(norm)
            branches[-1].roles[name] = Role.BETWEEN if norm is None else Role.READS

        return hook


def make_host(structure: Structure, forward: Loss, device: torch.device) -> tuple[Host, tuple[LinearRow, ...]]:
    """Run a forward pass without gradients. Return the host of the loop, and the linears with sub-blocks and roles.

    All processes hold the same model, and each a share of the tokens. Collective. Raises SnipError if a block does not
    begin with a norm, or a linear does not run.
    """
    # While the model runs, fully_shard has other parameters in the place of those that are trained.
    weights = {id(module): getattr(module, "weight", None) for module in structure.model.modules()}
    trace = _Trace(structure, forward)
    rows = {row.name: row for row in structure.linears}
    readers: list[StreamReader] = []
    missing = set(rows)
    for block, branches in zip(structure.blocks, trace.branches, strict=True):
        for branch in branches:
            last, boundary = next(reversed(branch.roles)), len(readers)
            readers.append(StreamReader(block if branch is branches[0] else branch.norms[0], boundary))
            missing -= branch.roles.keys()
            for name, role in branch.roles.items():
                writes = name == last and role is Role.BETWEEN
                rows[name] = replace(rows[name], sub_block=boundary, role=Role.WRITES if writes else role)
    if missing:
        raise SnipError(
            f"{min(missing)} does not run in a forward pass: SNIP measures linears that all tokens go through"
        )
    sinks = list(_sinks(structure, trace, weights))
    alone = dist.new_subgroups(1)[0] if dist.is_initialized() else None  # type: ignore[no-untyped-call]
    host = Host(
        groups=ProbeGroups(tp=alone, dp=None),
        device=device,
        segments=[StreamSegment(readers, structure.blocks[-1], is_last=True)],
        hook_input=_input_hook(structure.blocks[0]),
        hidden=trace.hidden,
        shard=TokenShard(rank=0, size=1, reports=True),
        sinks=tuple(row for row, _ in sinks),
        local_sinks=[LocalSink(i, weight) for i, (_, weight) in enumerate(sinks)],
        # Activation checkpointing runs forwards again while a backward pass runs.
        is_recomputing=lambda: torch._C._current_graph_task_id() != -1,
        full_tensor=_full_tensor,
        passes_alone=group_size(None) == 1,
        gathers_updates=any(isinstance(weight, DTensor) for weight in weights.values()),
    )
    return host, tuple(rows.values())


def _input_hook(block: nn.Module) -> Callable[[Change], RemovableHandle]:
    """Return what installs a hook that changes the residual stream before the first block."""

    def enter(change: Change) -> RemovableHandle:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = "" if args else next(iter(kwargs))
            stream = change(args[0] if args else kwargs[name])
            if torch.is_grad_enabled() and not stream.requires_grad:  # all embeddings are frozen
                stream = stream.detach().requires_grad_()
            return ((stream, *args[1:]), kwargs) if args else ((), {**kwargs, name: stream})

        return block.register_forward_pre_hook(hook, with_kwargs=True)

    return enter


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _sinks(structure: Structure, trace: _Trace, weights: dict[int, Any]) -> Iterator[tuple[SinkRow, nn.Parameter]]:
    """Yield embeddings, which write boundary 0, and norms by the boundary that they read."""
    inside = {id(module) for block in structure.blocks for module in block.modules()}
    sinks: list[tuple[str, int, nn.Module]] = []
    for name, module in structure.model.named_modules():
        if id(module) not in inside and isinstance(module, nn.Embedding):
            sinks.append((f"embedding.{name}", 0, module))
        elif id(module) not in inside and _is_norm(module):
            sinks.append((f"decoder.{name}", sum(map(len, trace.branches)), module))
    for boundary, branch in enumerate(itertools.chain(*trace.branches)):
        sinks += [(f"decoder.norm_{boundary}.{i}", boundary, norm) for i, norm in enumerate(branch.norms)]
    for name, boundary, module in sinks:
        weight = weights[id(module)]
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            yield SinkRow(name, boundary, weight.numel()), weight


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be sharded over ranks. Collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- a training step -----------------------------------------------------------------------------------------------
@dataclass
class PlainStep:
    """A training step as :class:`snip_megatron.runtime.host.HostStep`. A probe runs ``loss``, of the first batch."""

    step: int
    microbatches: int  # number of batches whose gradients one optimizer step adds up
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    sequences = 1  # a pass takes a whole batch, whose mean the loss is
    _restart: Callable[[], None] = lambda: None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore gradients, buffers and random states after this context. torch.compile is off inside."""
        # DDP may write the sum of a probe's gradients into the memory of the present ones.
        gradients = [(p, p.grad, p.grad.clone() if p.grad is not None and dist.is_initialized() else None)
                     for p in self.model.parameters()]  # fmt: skip
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        devices = {p.device for p, _, _ in gradients if p.device.type == "cuda"}
        cpu, states = torch.get_rng_state(), [(d, torch.cuda.get_rng_state(d)) for d in devices]

        @torch.no_grad()
        def restart() -> None:
            for parameter, _, _ in gradients:
                parameter.grad = None
            for buffer, content in buffers:
                buffer.copy_(content)
            torch.set_rng_state(cpu)
            for device, state in states:
                torch.cuda.set_rng_state(state, device)

        self._restart = restart
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            restart()
            for parameter, gradient, content in gradients:
                parameter.grad = gradient
                if gradient is not None and content is not None:
                    gradient.copy_(content)

    def prepare(self, microbatches: int, sequences: int) -> None:
        """Restore what the last pass has changed."""
        self._restart()

    def run(self) -> None:
        """Run forward and backward of the loss."""
        with torch.enable_grad():
            value = self.loss()
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise SnipError("step() takes a function that returns the loss of a batch: a scalar with a gradient")
        value.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def losses(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the loss of the batch as that of one token, because the loop computes no other."""
        value = self.loss().detach().reshape(1)
        return [(value, torch.ones_like(value))]

    def gradient_scale(self) -> float:
        """The loss is the mean over the tokens of a rank, and that of the step the mean over ranks."""
        return 1.0 / group_size(None)

    def gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """Return the gradient of the last pass, zeros if there is none.

        DDP and fully_shard have left the mean over ranks on every rank, whose sum is that of the ranks' gradients.
        """
        if weight.grad is None:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        return _full_tensor(weight.grad).clone()

    def join_gradients(self) -> None:
        """Do nothing: every process holds all of the model."""

    def update_of(self, weight: nn.Parameter) -> AdamWState | None:
        """Return the optimizer's next update of a parameter. None if it does not train it, or if Adam has not stepped.

        Collective if the optimizer's state is sharded.
        """
        optimizer = self.optimizer
        group = next((g for g in optimizer.param_groups if any(p is weight for p in g["params"])), None)
        if group is None:
            return None
        state = {
            name: _full_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in optimizer.state.get(weight, {}).items()
        }
        return AdamWState.of(group, state, 0, weight.numel())


def check_optimizer(optimizer: torch.optim.Optimizer, structure: Structure, *, weighs_updates: bool) -> None:
    """Raise SnipError if the optimizer does not hold all converted parameters that are trained.

    With ``weighs_updates``, also if weight divergence is not implemented for it, for an option of it, or for experts.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    weights = {name: weight for name, weight in structure.weights() if weight.requires_grad}
    if missing := [name for name, weight in weights.items() if id(weight) not in trained]:
        raise SnipError(
            f"the optimizer does not hold {len(missing)} of the {len(weights)} weights that SNIP converts, first"
            f" {missing[0]}: make it from this model's parameters, after fully_shard and .to(device), or freeze them"
        )
    if not weighs_updates:
        return
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise SnipError(
            f"optimizer {kind}: weight divergence knows torch's Adam and AdamW; estimator='fisher' needs none"
        )
    for group in optimizer.param_groups:
        coupled = not isinstance(optimizer, torch.optim.AdamW) and not group.get("decoupled_weight_decay")
        for name in ("amsgrad", "maximize", *(["weight_decay"] if coupled else [])):
            if group.get(name):
                raise SnipError(
                    f"optimizer {kind} with {name}={group[name]}: weight divergence knows the update of AdamW without"
                    " amsgrad and maximize; leave it out, use AdamW, or estimator='fisher'"
                )
    if any(row.experts > 1 for row in structure.linears):
        raise SnipError("estimator='noise' compares tokens of two passes, which experts may route apart")
