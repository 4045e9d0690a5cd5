"""Finds the blocks of a transformer and their linears, and by one forward pass what each linear does in its block."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from snip_megatron.precision import LinearId, LinearRow, Role
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.host import StreamReader
from snip_megatron.sensitivity.table import SinkRow

_LEAST = 4  # linears of a block: experts have fewer
_REFUSED = {"DataParallel": "DataParallel", "FullyShardedDataParallel": "FSDP1; use fully_shard"}


@dataclass(frozen=True)
class Structure:
    """What SNIP uses of a model without wrappers, found before it runs.

    Attributes:
        linears: global name → linear that is converted, in global order.
        adapters: name of a linear with a frozen weight → trainable linears of low rank beside it.
        others: names of linears of the blocks that stay as they are, with their classes.
    """

    model: nn.Module
    blocks: tuple[nn.Module, ...]
    linears: dict[str, nn.Module]
    adapters: dict[str, list[nn.Module]]
    others: list[str]

    @property
    def rows(self) -> tuple[LinearRow, ...]:
        """The linears as rows. Until the model has run, their places in the blocks are not known."""
        return tuple(
            LinearRow(name, 0, *shape_of(m), trained=_weight(m).requires_grad) for name, m in self.linears.items()
        )


@dataclass(frozen=True)
class Places:
    """What a forward pass shows.

    Attributes:
        begins: the modules that begin sub-blocks: each block, and the norms of its further branches.
        rows: the linears with their places.
        sinks: parameters beside the linears that gradient errors reach.
    """

    blocks: tuple[nn.Module, ...]
    begins: tuple[StreamReader, ...]
    hidden: int
    rows: tuple[LinearRow, ...]
    sinks: tuple[tuple[SinkRow, nn.Parameter], ...]


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Return (output features, input features) of a linear."""
    shape = tuple(_weight(module).shape)
    return (shape[0], shape[1]) if isinstance(module, nn.Linear) else (shape[1], shape[0])


def _weight(module: nn.Module) -> nn.Parameter:
    assert isinstance(module.weight, nn.Parameter)
    return module.weight


# -- before the model runs -----------------------------------------------------------------------------------------
def find_structure(model: nn.Module, blocks: Sequence[nn.Module] | None) -> Structure:
    """Find blocks and linears. The arguments are those of :func:`snip_megatron.plain.convert`.

    Raises SnipError if no blocks or linears are found, or blocks share a linear.
    """
    model = _unwrapped(model)
    found = Structure(model, tuple(blocks or _find_blocks(model)), {}, {}, [])
    owner: dict[int, str] = {}
    for layer, block in enumerate(found.blocks):
        of_block = {path: m for path, m in block.named_modules() if _is_linear(m)}
        for path, module in of_block.items():
            name = str(LinearId("decoder", layer, path))
            if owner.setdefault(id(module), name) != name:
                raise SnipError(f"{name} is also {owner[id(module)]}: blocks that share linears are not supported")
            base = _base_of(path, of_block)
            if base is not None:
                found.adapters.setdefault(str(LinearId("decoder", layer, base)), []).append(module)
            elif type(module) is nn.Linear or type(module).__name__ == "Conv1D":
                found.linears[name] = module
            else:
                found.others.append(f"{name} ({type(module).__name__})")
    if not found.linears:
        raise SnipError("the blocks have no nn.Linear or Conv1D that SNIP can choose formats for")
    return found


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP and torch.compile. Raises SnipError for other wrappers."""
    for module in model.modules():
        if wrapper := next((n for cls in type(module).__mro__ if (n := _REFUSED.get(cls.__name__))), None):
            raise SnipError(f"the model is wrapped by {wrapper}: convert() takes a plain model, DDP or fully_shard")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    return model if inner is None else _unwrapped(inner)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module)
        and all(sum(map(_is_linear, child.modules())) >= _LEAST for child in module)
    ]
    if not lists:
        raise SnipError(
            f"no blocks found in {type(model).__name__}: no ModuleList whose modules have {_LEAST} linears each; give"
            " blocks=[...]"
        )
    return max(lists, key=len)


def _base_of(path: str, linears: dict[str, nn.Module]) -> str | None:
    """Return the frozen linear that a trainable linear of lower rank stands beside, as LoRA's do; None for others."""
    module, parent = linears[path], path
    while _weight(module).requires_grad and parent:
        parent = parent.rpartition(".")[0]
        for other, base in linears.items():
            beside = other.rpartition(".")[0] == parent and not _weight(base).requires_grad
            if beside and min(shape_of(module)) < min(shape_of(base)):
                return other
    return None


# -- while the model runs ------------------------------------------------------------------------------------------
@dataclass
class _Branch:
    """A branch of the residual stream: the stream's address, the norms that read it, and the linears in their order.

    Attention and MLP side by side are one branch.
    """

    stream: int
    norms: list[nn.Module] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)


class _Trace:
    """Follows a forward pass by hooks: which norm of a block feeds which linears, and what runs in between."""

    def __init__(self, structure: Structure) -> None:
        self.hidden = 0
        self.branches: list[list[_Branch]] = [[] for _ in structure.blocks]
        self._structure = structure
        self._outputs: dict[int, tuple[nn.Module, int, torch.Tensor]] = {}  # of the norms in this block, by address

    def run(self, forward: Callable[[], object]) -> None:
        with ExitStack() as stack:
            for layer, block in enumerate(self._structure.blocks):
                stack.callback(block.register_forward_pre_hook(self._block, with_kwargs=True).remove)
                for module in block.modules():
                    if _is_norm(module):
                        stack.callback(module.register_forward_hook(self._norm).remove)
                prefix = str(LinearId("decoder", layer, ""))
                for name, module in self._structure.linears.items():
                    if name.startswith(prefix):
                        stack.callback(module.register_forward_pre_hook(self._linear(layer, name)).remove)
            with torch.no_grad():
                forward()

    def _block(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        stream = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(stream, torch.Tensor):
            raise SnipError("the first argument of a block must be the residual stream")
        self.hidden = stream.shape[-1]
        self._outputs.clear()

    def _norm(self, module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(output, torch.Tensor) and output.shape[-1] == self.hidden:
            self._outputs[output.data_ptr()] = module, args[0].data_ptr(), output

    def _linear(self, layer: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if isinstance(module.weight, DTensor):
                raise SnipError(f"{name} is sharded while it runs: tensor parallelism needs Megatron")
            branches, fed = self.branches[layer], self._outputs.get(args[0].data_ptr())
            if fed is not None and (not branches or branches[-1].stream != fed[1]):
                branches.append(_Branch(fed[1]))
            if not branches:
                raise SnipError(
                    f"{name} runs before any norm: SNIP measures blocks that begin with a norm; policy= and map= need"
                    " none"
                )
            if fed is not None and fed[0] not in branches[-1].norms:
                branches[-1].norms.append(fed[0])
            branches[-1].roles[name] = Role.BETWEEN if fed is None else Role.READS

        return hook


def find_places(structure: Structure, forward: Callable[[], object]) -> Places:
    """Run a forward pass without gradients, and return what every linear does in its block.

    Raises SnipError if a block does not begin with a norm, or a linear does not run.
    """
    trace = _Trace(structure)
    # While the model runs, fully_shard has other parameters in the place of those that are trained.
    weights = {id(m): getattr(m, "weight", None) for m in structure.model.modules()}
    trace.run(forward)
    rows, placed = {row.name: row for row in structure.rows}, dict[str, LinearRow]()
    begins: list[StreamReader] = []
    for block, branches in zip(structure.blocks, trace.branches, strict=True):
        for branch in branches:
            last, boundary = next(reversed(branch.roles)), len(begins)
            begins.append(StreamReader(block if branch is branches[0] else branch.norms[0], boundary))
            for name, role in branch.roles.items():
                ends = name == last and role is Role.BETWEEN
                placed[name] = replace(rows[name], sub_block=boundary, role=Role.WRITES if ends else role)
    if missing := rows.keys() - placed.keys():
        raise SnipError(
            f"{min(missing)} does not run in a forward pass: SNIP measures linears that all tokens go through"
        )
    sinks = tuple(_sinks(structure, trace, placed, weights))
    return Places(structure.blocks, tuple(begins), trace.hidden, tuple(placed[name] for name in rows), sinks)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _sinks(
    structure: Structure, trace: _Trace, rows: dict[str, LinearRow], weights: dict[int, Any]
) -> Iterator[tuple[SinkRow, nn.Parameter]]:
    """Yield the embeddings, which write boundary 0, the norms by the boundary that they read, and adapters."""
    inside = {id(module) for block in structure.blocks for module in block.modules()}
    found: list[tuple[str, int, nn.Module]] = []
    for name, module in structure.model.named_modules():
        if id(module) not in inside and isinstance(module, nn.Embedding):
            found.append((f"embedding.{name}", 0, module))
        elif id(module) not in inside and _is_norm(module):
            found.append((f"decoder.{name}", sum(map(len, trace.branches)), module))
    for boundary, branch in enumerate(itertools.chain(*trace.branches)):
        found += [(f"decoder.norm_{boundary}.{i}", boundary, norm) for i, norm in enumerate(branch.norms)]
    for base, modules in structure.adapters.items():
        found += [(f"{base}.adapter_{i}", rows[base].sub_block, module) for i, module in enumerate(modules)]
    for name, boundary, module in found:
        weight = weights[id(module)]
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            yield SinkRow(name, boundary, weight.numel()), weight
