"""Megatron's parallel linears with quantised GEMMs.

Instances are made by assigning one of these classes to ``__class__`` of a built module. The classes have no
``__init__`` and no parameters of their own, so checkpoints stay interchangeable with Megatron's.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear, packs_gradient
from snip_megatron.layers.context import LinearHandle
from snip_megatron.precision.errors import SnipError, quoted

_DEFAULTS = {"gtp_remat_size": 1}  # of arguments that the quantised path does not implement; None of others
_HANDLED = {"bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group"}


def product(
    handle: LinearHandle,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    sequence_parallel: bool = False,
    allreduce_dgrad: bool = False,
    tp_group: Any = None,
    scatters: bool = False,
) -> torch.Tensor:
    """Return X·Wᵀ (+ bias) in the formats of the precision map. The arguments are those of :class:`LinearCall`."""
    override = handle.context.override
    call = LinearCall(
        handle=handle,
        sequence_parallel=sequence_parallel,
        allreduce_dgrad=allreduce_dgrad,
        tp_group=tp_group,
        has_backward=torch.is_grad_enabled(),
        override=None if override is None else override(handle),
        scatters=scatters,
        packs_gradient=scatters and torch.is_grad_enabled() and packs_gradient(handle, x),
    )
    return QuantizedLinear.apply(x, weight, bias, call)  # type: ignore[no-untyped-call,no-any-return]


def scatters(handle: LinearHandle) -> bool:
    """Return whether a row-parallel linear under sequence parallelism reduce-scatters its output itself.

    It does in a pass of training under the map, with or without gradients, because recomputation must repeat the
    forward. One node of autograd then takes less host time than two. Partial sums may also be quantised before they are
    exchanged, and the output gradient before it is gathered, which Megatron's own reduction does in the training dtype.
    """
    context = handle.context
    return handle.tp_group is not None and not handle.is_stock and context.override is None and not context.probing


class _QuantizedForward:
    """Runs the GEMMs in the formats of the precision map. With three bf16 GEMMs, Megatron's own code runs."""

    snip: LinearHandle

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.snip.is_stock:
            return super()._forward_impl(input, weight, **kwargs)  # type: ignore[misc,no-any-return]
        for name, value in kwargs.items():
            if name not in _HANDLED and value is not None and value != _DEFAULTS.get(name):
                raise SnipError(
                    f"{self.snip.name}: Megatron asks for {name}={quoted(value)}, which quantised linears do not have"
                )
        return product(
            self.snip,
            input,
            weight,
            kwargs.get("bias"),
            sequence_parallel=bool(kwargs.get("sequence_parallel", False)),
            allreduce_dgrad=bool(kwargs.get("allreduce_dgrad", False)),
            tp_group=kwargs.get("tp_group"),
        )


class SnipColumnParallelLinear(_QuantizedForward, ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear whose GEMMs follow the precision map."""


class SnipColumnParallelLinearGathered(ColumnParallelLinearGathered, SnipColumnParallelLinear):  # type: ignore[misc]
    """A linear in place of a whole attention or MLP, in heterogeneous layers."""


class SnipRowParallelLinear(_QuantizedForward, RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear whose GEMMs follow the precision map."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the linear, and reduce its output over tensor parallel ranks. See :func:`scatters`."""
        shards = self.sequence_parallel and not self.explicit_expert_comm and not self.config.cpu_offloading
        if not (shards and scatters(self.snip)):
            return super().forward(input_)  # type: ignore[no-any-return]
        output = product(self.snip, input_, self.weight, None, tp_group=self.tp_group, scatters=True)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias if self.skip_bias_add else None
        return output + self.bias, None
