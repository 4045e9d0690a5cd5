"""Finds the blocks of a transformer, and in each block its four linears and two norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from snip_megatron.errors import SnipError
from snip_megatron.precision import LINEAR_KINDS

_LINEARS = "linears=(<qkv>, <attention's output>, <mlp's input>, <mlp's output>)"


@dataclass(frozen=True)
class Block:
    """One block of the residual stream: attention and MLP.

    Attributes:
        module: The block. Its first argument, and its output or the first of its outputs, is the residual stream.
        linears: The linears in the order of LINEAR_KINDS.
        norms: The norms that read the residual stream before attention and before the MLP.
    """

    module: nn.Module
    linears: tuple[nn.Linear, ...]
    norms: tuple[nn.Module, nn.Module]


@dataclass(frozen=True)
class Structure:
    """What SNIP uses of a model.

    Attributes:
        blocks: The blocks in order.
        hidden: Width of the residual stream.
        sinks: Name, residual boundary and weight of the embeddings and norms that gradient errors reach.
    """

    blocks: tuple[Block, ...]
    hidden: int
    sinks: tuple[tuple[str, int, nn.Parameter], ...]


def check_plain(model: nn.Module) -> None:
    """Raise SnipError if the model is wrapped or sharded, or if this process is one of several."""
    for module in model.modules():
        name = next((n for cls in type(module).__mro__ if (n := _WRAPPERS.get(cls.__name__))), None)
        if getattr(module, "_compiled_call_impl", None) is not None:  # module.compile() wraps nothing
            name = _WRAPPERS["OptimizedModule"]
        if name is not None:
            raise SnipError(
                f"the model is wrapped by {name}: convert() takes a plain model in one process; on several GPUs train"
                " with Megatron (docs/own-script.md)"
            )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise SnipError(
            f"this is one of {dist.get_world_size()} processes: convert() takes one; on several GPUs train with"
            " Megatron (docs/own-script.md)"
        )


_WRAPPERS = {
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
    "FSDPModule": "FSDP2 (fully_shard)",
    "FullyShardedDataParallel": "FSDP",
    "OptimizedModule": "torch.compile",
}


def find_structure(
    model: nn.Module, blocks: Sequence[nn.Module] | None, linears: Sequence[str] | None, norms: Sequence[str] | None
) -> Structure:
    """Find blocks, linears, norms and embeddings.

    Args:
        model: The model.
        blocks: The blocks in order. None: the longest ModuleList or Sequential whose modules hold four linears or more.
        linears: Names in a block of its four linears. None: all linears of a block, in the order of their definition.
        norms: Names in a block of the two norms. None: all modules of a block whose class is named a norm.

    Raises:
        SnipError: If a block does not have this structure. The message names the argument that says it.
    """
    found = tuple(_block(module, i, linears, norms) for i, module in enumerate(blocks or _find_blocks(model)))
    hidden = found[0].linears[0].in_features
    for i, block in enumerate(found):
        _check_widths(block, hidden, i)
    return Structure(found, hidden, tuple(_sinks(model, found, hidden)))


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module)
        and all(sum(isinstance(m, nn.Linear) for m in child.modules()) >= len(LINEAR_KINDS) for child in module)
    ]
    if not lists:
        raise SnipError(
            f"no blocks found in {type(model).__name__}: no ModuleList whose modules have four nn.Linear each; give"
            " blocks=[...]"
        )
    return max(lists, key=len)


def _block(module: nn.Module, index: int, linears: Sequence[str] | None, norms: Sequence[str] | None) -> Block:
    of_block = _named(module, index, linears, "linears", nn.Linear)
    around = _named(module, index, norms, "norms", nn.Module)
    if len(of_block) != len(LINEAR_KINDS):
        raise SnipError(
            f"block {index} has {len(of_block)} linears ({', '.join(of_block)}): SNIP takes four, with Q, K and V, and"
            f" gate and up, fused to one each; give {_LINEARS}"
        )
    if len(around) != 2:
        raise SnipError(
            f"block {index} has {len(around)} norms ({', '.join(around) or 'none'}): SNIP takes the two that read the"
            " residual stream; give norms=(<attention's>, <mlp's>)"
        )
    first, second = around.values()
    return Block(module, tuple(m for m in of_block.values() if isinstance(m, nn.Linear)), (first, second))


def _named(
    block: nn.Module, index: int, names: Sequence[str] | None, argument: str, kind: type[nn.Module]
) -> dict[str, nn.Module]:
    modules = dict(block.named_modules())
    if names is None:
        return {name: module for name, module in modules.items() if _is(module, kind)}
    for name in names:
        if not isinstance(modules.get(name), kind):
            raise SnipError(f"{argument}: block {index} has no {kind.__name__} named {name}")
    return {name: modules[name] for name in names}


def _is(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, nn.Linear) if kind is nn.Linear else "norm" in type(module).__name__.lower()


def _check_widths(block: Block, hidden: int, index: int) -> None:
    qkv, proj, fc1, fc2 = block.linears
    if {qkv.in_features, proj.out_features, fc1.in_features, fc2.out_features} != {hidden}:
        shapes = ", ".join(f"{m.in_features} -> {m.out_features}" for m in block.linears)
        raise SnipError(
            f"block {index}: linears {shapes} do not read and write a residual stream of {hidden}; give {_LINEARS}"
        )


def _sinks(model: nn.Module, blocks: Sequence[Block], hidden: int) -> list[tuple[str, int, nn.Parameter]]:
    """Embeddings write boundary 0; the norms of block i read boundaries 2i and 2i + 1, and a final norm the last."""
    found: list[tuple[str, int, nn.Parameter]] = []
    inside = {id(module) for block in blocks for module in block.module.modules()}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if id(module) in inside or not isinstance(weight, nn.Parameter) or weight.shape[-1:] != torch.Size([hidden]):
            continue
        if isinstance(module, nn.Embedding):
            found.append((f"embedding.{name}", 0, weight))
        elif _is(module, nn.Module):
            found.append((f"decoder.{name}", 2 * len(blocks), weight))
    for layer, block in enumerate(blocks):
        for boundary, norm in enumerate(block.norms, 2 * layer):
            weight = getattr(norm, "weight", None)
            if isinstance(weight, nn.Parameter):
                found.append((f"decoder.layers.{layer}.norm_{boundary % 2}", boundary, weight))
    return [sink for sink in found if sink[2].requires_grad]
