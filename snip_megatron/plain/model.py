"""The linears of a transformer's blocks: finding them, and converting them in place."""

import copyreg
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import LinearId, LinearRow
from snip_megatron.precision.errors import SnipError

_MIN_LINEARS = 4  # of a block; the experts of a mixture have fewer
_UNSUPPORTED_WRAPPERS = {"DataParallel": "DataParallel", "FullyShardedDataParallel": "FSDP1; use fully_shard"}


@dataclass(frozen=True)
class Structure:
    """The linears of a model's blocks.

    Attributes:
        model: the model without DDP and torch.compile around it.
        blocks: the blocks in order.
        linears: global name → linear that is converted, in global order.
        others: names of the blocks' other linears, which stay as they are, with their classes.
    """

    model: nn.Module
    blocks: tuple[nn.Module, ...]
    linears: dict[str, nn.Linear]
    others: list[str]

    def rows(self) -> tuple[LinearRow, ...]:
        """Return the linears as rows. Only a forward pass shows their sub-blocks and roles."""
        return tuple(
            LinearRow(name, 0, module.out_features, module.in_features, trained=module.weight.requires_grad)
            for name, module in self.linears.items()
        )


def find_structure(model: nn.Module, blocks: Sequence[nn.Module] | None) -> Structure:
    """Find blocks and linears. The arguments are those of :func:`snip_megatron.plain.convert`.

    Raises SnipError if no blocks or linears are found, or blocks share a linear.
    """
    model = _unwrap(model)
    structure = Structure(model, tuple(blocks or _find_blocks(model)), {}, [])
    names: dict[int, str] = {}
    for layer, block in enumerate(structure.blocks):
        for path, module in block.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            name = str(LinearId("decoder", layer, path))
            if names.setdefault(id(module), name) != name:
                raise SnipError(f"{name} is also {names[id(module)]}: blocks that share linears are not supported")
            if type(module) is nn.Linear:
                structure.linears[name] = module
            else:
                structure.others.append(f"{name} ({type(module).__name__})")
    if not structure.linears:
        raise SnipError("the blocks have no nn.Linear that SNIP can choose formats for")
    return structure


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and torch.compile. Raises SnipError for other wrappers."""
    for module in model.modules():
        for cls in type(module).__mro__:
            if wrapper := _UNSUPPORTED_WRAPPERS.get(cls.__name__):
                raise SnipError(f"the model is wrapped by {wrapper}: convert() takes a plain model, DDP or fully_shard")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    return model if inner is None else _unwrap(inner)


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module)
        and all(sum(isinstance(m, nn.Linear) for m in child.modules()) >= _MIN_LINEARS for child in module)
    ]
    if not lists:
        raise SnipError(
            f"no blocks found in {type(model).__name__}: no ModuleList whose modules have {_MIN_LINEARS} linears each;"
            " give blocks=[...]"
        )
    return max(lists, key=len)


# -- conversion ----------------------------------------------------------------------------------------------------
class SnipLinear(nn.Linear):
    """An ``nn.Linear`` whose GEMMs follow the precision map. Conversion assigns it as the class of a built module.

    With three bf16 GEMMs the code of ``nn.Linear`` runs. torch.compile leaves the linear out of its graphs, because
    the map may change at any step.
    """

    snip: LinearHandle

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Make copies and pickles plain ``nn.Linear``, because no map of the training would reach them."""
        state = {name: value for name, value in self.__dict__.items() if name != "snip"}
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute Y = X·Wᵀ (+ bias). Under autocast in autocast's dtype, as ``nn.Linear`` does."""
        handle = self.snip
        if handle.is_stock:
            return super().forward(x)
        device = x.device.type
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if not torch.is_grad_enabled():
            # A write to weight.data, as averaged weights are put in place, changes no version of the weight.
            handle.state.weights.clear()
        call = LinearCall(handle, has_backward=torch.is_grad_enabled())
        with torch.autocast(device, enabled=False):
            return QuantizedLinear.apply(x, weight, bias, call)  # type: ignore[no-untyped-call,no-any-return]


def convert_linears(
    linears: Mapping[str, nn.Linear], rows: tuple[LinearRow, ...], context: StepContext
) -> LinearRegistry:
    """Convert linears in place, by global name. Parameters and their names do not change.

    ``rows`` describe the linears in the same order. ``context`` is the state of the step, which all linears share.
    """
    registry = LinearRegistry(rows, context)
    for row, module in zip(rows, linears.values(), strict=True):
        features = torch.arange(row.n), torch.arange(row.k)
        handle = LinearHandle(row.id, "column", row.n, row.k, 0, 0, 1, *features, context, module)
        module.__class__ = SnipLinear
        module.snip = handle  # type: ignore[assignment]
        registry.add(handle)
    return registry
