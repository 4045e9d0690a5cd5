"""``nn.Linear`` and Hugging Face's ``Conv1D`` with quantised GEMMs, made by assigning the class of a built module."""

import copyreg
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import LinearRow


class Converted(nn.Module):
    """Mixed into the class of a linear, whose GEMMs then follow the precision map.

    With three bf16 GEMMs the linear's own code runs. torch.compile leaves it out of its graphs, because a map may
    change at any step.
    """

    snip: LinearHandle

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Make a module of the class before conversion of a copy or a pickle: no map of the training would reach it."""
        state = {name: value for name, value in self.__dict__.items() if name != "snip"}
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), state  # type: ignore[attr-defined]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute Y = X·Wᵀ (+ bias). Under autocast in autocast's dtype, as the module before conversion does."""
        handle = self.snip
        if handle.is_stock:
            found: torch.Tensor = super().forward(x)
            return found
        device = x.device.type
        weight: Any = self.weight
        bias: Any = self.bias
        if not isinstance(self, nn.Linear):
            weight = weight.t().contiguous()
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if not torch.is_grad_enabled():
            # weight.data may have been written, as averaged weights are, which nothing counts
            handle.state.weights.clear()
        call = LinearCall(handle, has_backward=torch.is_grad_enabled())
        with torch.autocast(device, enabled=False):
            return QuantizedLinear.apply(x, weight, bias, call)  # type: ignore[no-untyped-call,no-any-return]


def convert_linears(
    linears: Mapping[str, nn.Module], rows: tuple[LinearRow, ...], context: StepContext
) -> LinearRegistry:
    """Convert linears in place, by global name. ``rows`` describe them in the same order, and ``context`` is the state
    of the step, which all share. Parameters and their names do not change.
    """
    registry, classes = LinearRegistry(rows, context), dict[type, type]()
    for row, module in zip(rows, linears.values(), strict=True):
        features = torch.arange(row.n), torch.arange(row.k)
        handle = LinearHandle(row.id, "column", row.n, row.k, 0, 0, 1, *features, context, module)
        cls = type(module)
        module.__class__ = classes.setdefault(cls, type(f"Snip{cls.__name__}", (Converted, cls), {}))
        module.snip = handle  # type: ignore[assignment]
        registry.add(handle)
    return registry
