"""``nn.Linear`` with quantised GEMMs, made by assigning the class of a built module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from snip_megatron.errors import SnipError
from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import LinearRow, Role, dense_names


class SnipLinear(nn.Linear):
    """A linear whose GEMMs follow the precision map. With three bf16 GEMMs, torch's own code runs."""

    snip: LinearHandle

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Make a plain ``nn.Linear`` of a copy or a pickle, which no step and no map of the training would reach."""
        state = {name: value for name, value in self.__dict__.items() if name != "snip"}
        return nn.Linear, (self.in_features, self.out_features, False, "meta"), state  # "meta" draws no numbers

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
            # weight.data may have been written, as averaged weights are, which nothing counts
            handle.state.weights.clear()
        call = LinearCall(handle, has_backward=torch.is_grad_enabled())
        with torch.autocast(device, enabled=False):
            return QuantizedLinear.apply(x, weight, bias, call)  # type: ignore[no-untyped-call,no-any-return]


def convert_linears(blocks: Sequence[Sequence[nn.Linear]], context: StepContext) -> LinearRegistry:
    """Convert the linears of all blocks in place. Parameters and their names do not change.

    Args:
        blocks: the linears of each block in the order of DENSE_LAYER.
        context: the state of the step, which all linears share.

    Raises:
        SnipError: If a linear is of another class than ``nn.Linear``, is frozen, or occurs twice.
    """
    rows = linear_rows(blocks)
    registry = LinearRegistry(rows, context)
    converted: set[int] = set()
    modules = (module for linears in blocks for module in linears)
    for row, module in zip(rows, modules, strict=True):
        linear = row.id
        if type(module) is not nn.Linear:
            raise SnipError(f"{linear}: cannot quantise a {type(module).__qualname__}; convert() takes nn.Linear")
        if not module.weight.requires_grad:
            raise SnipError(f"{linear} is frozen: SNIP measures every linear of a block through its gradient")
        if id(module) in converted:
            raise SnipError(f"{linear} is a linear of another block as well; shared blocks are not supported")
        converted.add(id(module))
        handle = _handle(module, row, context)
        module.__class__ = SnipLinear
        module.snip = handle  # type: ignore[assignment]
        registry.add(handle)
    return registry


def linear_rows(blocks: Sequence[Sequence[nn.Linear]]) -> tuple[LinearRow, ...]:
    """Return the rows of the linears of all blocks. They are named as in Megatron."""
    names = dense_names(len(blocks))
    modules = (module for linears in blocks for module in linears)
    return tuple(LinearRow(name, 0, m.out_features, m.in_features) for name, m in zip(names, modules, strict=True))


def _handle(module: nn.Linear, row: LinearRow, context: StepContext) -> LinearHandle:
    return LinearHandle(
        id=row.id,
        parallel="column" if row.role is Role.READS else "row",
        n=row.n,
        k=row.k,
        stage=0,
        tp_rank=0,
        tp_size=1,
        out_features=torch.arange(row.n),
        in_features=torch.arange(row.k),
        context=context,
        module=module,
    )
