"""Transformer Engine's linears, as Megatron wraps them, with quantised GEMMs.

As in :mod:`snip_megatron.megatron.linear`, instances are made by assigning a class. This module can only be imported
where Transformer Engine can.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.heterogeneous.linear_replacements import TELayerNormColumnParallelLinearGathered

from snip_megatron.layers.context import LinearHandle
from snip_megatron.megatron.compat.te_norm import normalized
from snip_megatron.megatron.compat.te_recipe import StockState, forward_under
from snip_megatron.megatron.linear import product, scatters


def ran_delayed_wgrad(module: Any, handle: LinearHandle) -> bool:
    """Run what the earliest backward of a linear has left to do, and tell DDP that its wgrad is there.

    Returns False, and does nothing, if that backward was Transformer Engine's own.
    """
    if not handle.state.delayed:
        return False
    handle.state.delayed.popleft()()
    module._trigger_wgrad_accumulation_and_reduce_hooks()
    return True


class _QuantizedForward(StockState):
    """Runs the GEMMs in the formats of the precision map. With three bf16 GEMMs, Transformer Engine's own code runs.

    Attributes that are read here:
        parallel_mode: "column", "row", or None for a linear that exchanges nothing.
        tp_size, tp_group: what it exchanges over; 1 if it exchanges nothing.
        sequence_parallel: whether tokens are sharded and ``tp_size`` is not 1.
        apply_bias: whether the linear adds its bias itself.
    """

    snip: LinearHandle

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.snip.is_stock:
            return super().forward(x)  # type: ignore[misc,no-any-return]
        if self.snip.runs_recipe:
            return forward_under(self, self.snip, [self.weight], super().forward, x)  # type: ignore[misc,no-any-return]
        self.is_first_microbatch = False  # as after a forward of the stock class
        returned = self.bias if self.te_return_bias else None
        bias = self.bias if self.apply_bias else None
        if self.parallel_mode == "row" and self.tp_size > 1:
            y = self._reduced_product(x)
            return y if bias is None else y + bias, returned
        column = self.parallel_mode == "column" and self.tp_size > 1
        y = product(
            self.snip,
            self._input(x),
            self.weight,
            bias,
            sequence_parallel=column and self.sequence_parallel,
            allreduce_dgrad=column and not self.sequence_parallel,
            tp_group=self.tp_group if column else None,
        )
        return y, returned

    def _input(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def backward_dw(self: Any) -> None:
        """Run the wgrad of the earliest backward that left it to this call (``--delay-wgrad-compute``)."""
        if not ran_delayed_wgrad(self, self.snip):
            super().backward_dw()  # type: ignore[misc]

    def _reduced_product(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Return X·Wᵀ summed over tensor parallel ranks."""
        if self.sequence_parallel and scatters(self.snip):
            return product(self.snip, x, self.weight, None, tp_group=self.tp_group, scatters=True)
        y = product(self.snip, x, self.weight, None)
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return reduce(y, group=self.tp_group)  # type: ignore[no-any-return]


class SnipTELinear(_QuantizedForward, TELinear):  # type: ignore[misc]
    """A linear that every tensor parallel rank holds whole, or whose input and output others exchange."""


class SnipTEColumnParallelLinear(_QuantizedForward, TEColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear whose GEMMs follow the precision map."""


class SnipTERowParallelLinear(_QuantizedForward, TERowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear whose GEMMs follow the precision map."""


class SnipTELayerNormColumnParallelLinear(_QuantizedForward, TELayerNormColumnParallelLinear):  # type: ignore[misc]
    """A norm and a column-parallel linear whose GEMMs follow the precision map."""

    def _input(self, x: torch.Tensor) -> torch.Tensor:
        return normalized(self, x)


class SnipTELayerNormColumnParallelLinearGathered(
    TELayerNormColumnParallelLinearGathered,  # type: ignore[misc]
    SnipTELayerNormColumnParallelLinear,
):
    """A norm and a linear in place of a whole attention or MLP, in heterogeneous layers."""


CLASSES: dict[type, tuple[type, str]] = {
    TELinear: (SnipTELinear, "whole"),
    TEColumnParallelLinear: (SnipTEColumnParallelLinear, "column"),
    TERowParallelLinear: (SnipTERowParallelLinear, "row"),
    TELayerNormColumnParallelLinear: (SnipTELayerNormColumnParallelLinear, "column"),
    TELayerNormColumnParallelLinearGathered: (SnipTELayerNormColumnParallelLinearGathered, "column"),
}
"""Class of a built linear → the class that it gets, and how its weight is sharded."""
