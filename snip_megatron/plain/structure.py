"""Finds the blocks of a transformer, and in each block its four linears and two norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from snip_megatron.errors import SnipError
from snip_megatron.precision import DENSE_LAYER
from snip_megatron.runtime.host import Block
from snip_megatron.statistics.table import SinkRow

_LINEARS = "linears=(<qkv>, <attention's output>, <mlp's input>, <mlp's output>)"
_WRAPPERS = {
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
    "FSDPModule": "FSDP2 (fully_shard)",
    "FullyShardedDataParallel": "FSDP",
    "OptimizedModule": "torch.compile",
}


@dataclass(frozen=True)
class Structure:
    """What SNIP uses of a model.

    Attributes:
        blocks: the blocks in order.
        linears: the linears of each block in the order of DENSE_LAYER.
        hidden: width of the residual stream.
        sinks: the embeddings and norms that gradient errors reach.
    """

    blocks: tuple[Block, ...]
    linears: tuple[tuple[nn.Linear, ...], ...]
    hidden: int
    sinks: tuple[tuple[SinkRow, nn.Parameter], ...]

    @property
    def weights(self) -> list[Any]:
        """All parameters whose gradients are read."""
        return [m.weight for linears in self.linears for m in linears] + [weight for _, weight in self.sinks]


def check_plain(model: nn.Module) -> None:
    """Raise SnipError if the model is wrapped or sharded, or if this process is one of several."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    found = f"this is one of {ranks} processes: convert() takes one" if ranks > 1 else None
    for module in model.modules():
        name = next((n for cls in type(module).__mro__ if (n := _WRAPPERS.get(cls.__name__))), None)
        if getattr(module, "_compiled_call_impl", None) is not None:  # module.compile() wraps nothing
            name = _WRAPPERS["OptimizedModule"]
        if name is not None:
            found = f"the model is wrapped by {name}: convert() takes a plain model in one process"
    if found is not None:
        raise SnipError(f"{found}; on several GPUs train with Megatron (docs/own-script.md)")


def find_structure(
    model: nn.Module, blocks: Sequence[nn.Module] | None, linears: Sequence[str] | None, norms: Sequence[str] | None
) -> Structure:
    """Find blocks, linears, norms and embeddings. The arguments are those of :func:`snip_megatron.plain.convert`.

    Raises:
        SnipError: a block does not have this structure. The message names the argument that says it.
    """
    modules = list(blocks or _find_blocks(model))
    of_linears = tuple(_linears(module, i, linears) for i, module in enumerate(modules))
    of_norms = [_norms(module, i, norms) for i, module in enumerate(modules)]
    hidden = of_linears[0][0].in_features
    for i, (qkv, proj, fc1, fc2) in enumerate(of_linears):
        if {qkv.in_features, proj.out_features, fc1.in_features, fc2.out_features} != {hidden}:
            shapes = ", ".join(f"{m.in_features} -> {m.out_features}" for m in (qkv, proj, fc1, fc2))
            raise SnipError(
                f"block {i}: linears {shapes} do not read and write a residual stream of {hidden}; give {_LINEARS}"
            )
    found = tuple(Block(module, of_norms[i][1], i) for i, module in enumerate(modules))
    return Structure(found, of_linears, hidden, tuple(_sinks(model, modules, of_norms, hidden)))


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module)
        and all(sum(isinstance(m, nn.Linear) for m in child.modules()) >= len(DENSE_LAYER) for child in module)
    ]
    if not lists:
        raise SnipError(
            f"no blocks found in {type(model).__name__}: no ModuleList whose modules have four nn.Linear each; give"
            " blocks=[...]"
        )
    return max(lists, key=len)


def _linears(block: nn.Module, index: int, names: Sequence[str] | None) -> tuple[nn.Linear, ...]:
    found = {n: m for n, m in _named(block, index, names, "linears").items() if isinstance(m, nn.Linear)}
    if len(found) != len(DENSE_LAYER):
        raise SnipError(
            f"block {index} has {len(found)} linears ({', '.join(found)}): SNIP takes four, with Q, K and V, and gate"
            f" and up, fused to one each; give {_LINEARS}"
        )
    return tuple(found.values())


def _norms(block: nn.Module, index: int, names: Sequence[str] | None) -> list[nn.Module]:
    found = {n: m for n, m in _named(block, index, names, "norms").items() if names is not None or _is_norm(m)}
    if len(found) != 2:
        raise SnipError(
            f"block {index} has {len(found)} norms ({', '.join(found) or 'none'}): SNIP takes the two that read the"
            " residual stream; give norms=(<attention's>, <mlp's>)"
        )
    return list(found.values())


def _named(block: nn.Module, index: int, names: Sequence[str] | None, argument: str) -> dict[str, nn.Module]:
    modules = dict(block.named_modules())
    for name in names or ():
        if name not in modules:
            raise SnipError(f"{argument}: block {index} has no module named {name}")
    return modules if names is None else {name: modules[name] for name in names}


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _sinks(
    model: nn.Module, blocks: Sequence[nn.Module], norms: Sequence[Sequence[nn.Module]], hidden: int
) -> list[tuple[SinkRow, nn.Parameter]]:
    """Embeddings write boundary 0; the norms of block i read boundaries 2i and 2i + 1, and a final norm the last."""
    inside = {id(module) for block in blocks for module in block.modules()}
    found: list[tuple[str, int, nn.Module]] = []
    for name, module in model.named_modules():
        if id(module) not in inside and isinstance(module, nn.Embedding):
            found.append((f"embedding.{name}", 0, module))
        elif id(module) not in inside and _is_norm(module):
            found.append((f"decoder.{name}", 2 * len(blocks), module))
    for layer, pair in enumerate(norms):
        found += [(f"decoder.layers.{layer}.norm_{i}", 2 * layer + i, norm) for i, norm in enumerate(pair)]
    weights = [(name, boundary, getattr(module, "weight", None)) for name, boundary, module in found]
    return [
        (SinkRow(name, boundary, weight.numel()), weight)
        for name, boundary, weight in weights
        if isinstance(weight, nn.Parameter) and weight.requires_grad and weight.shape[-1:] == torch.Size([hidden])
    ]
