"""Megatron's parallel linears with quantised GEMMs.

Instances are made by assigning one of these classes to ``__class__`` of a built module. The classes have no
``__init__`` and no parameters of their own, so checkpoints stay interchangeable with Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from snip_megatron.errors import SnipError, quoted
from snip_megatron.layers.autograd import LinearCall, QuantizedLinear, packs_gradient
from snip_megatron.layers.context import LinearHandle

# Arguments of Megatron's GEMM that the quantised path does not implement, with the values that it may ignore.
_MUST_BE_DEFAULT: dict[str, tuple[Any, ...]] = {
    "grad_output_buffer": (None,),
    "wgrad_deferral_limit": (None, 0),
    "gtp_remat_size": (None, 0, 1),
    "async_grad_allreduce": (None,),
    "output_dtype": (None,),
}
_HANDLED = {"bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group"}


def _call(
    handle: LinearHandle, kwargs: dict[str, Any], *, scatters: bool = False, packs_gradient: bool = False
) -> LinearCall:
    """Return what a forward of :class:`QuantizedLinear` is told.

    Args:
        handle: The converted linear.
        kwargs: The arguments other than tensors that Megatron passes to its own GEMM.
        scatters: Whether the output is reduce-scattered over the tokens of tensor parallel ranks.
        packs_gradient: With ``scatters``, whether the output gradient is quantised before it is gathered.

    Raises:
        SnipError: If an argument requires what the quantised path does not implement.
    """
    for name, value in kwargs.items():
        if name in _HANDLED or (value is None and name in _MUST_BE_DEFAULT):
            continue
        if name not in _MUST_BE_DEFAULT or not any(value is default for default in _MUST_BE_DEFAULT[name]):
            raise SnipError(
                f"{handle.name}: Megatron asks for {name}={quoted(value)}, which quantised linears do not support"
            )
    override = handle.context.override
    return LinearCall(
        handle=handle,
        sequence_parallel=bool(kwargs.get("sequence_parallel", False)),
        allreduce_dgrad=bool(kwargs.get("allreduce_dgrad", False)),
        tp_group=kwargs.get("tp_group"),
        has_backward=torch.is_grad_enabled(),
        override=None if override is None else override(handle),
        scatters=scatters,
        packs_gradient=packs_gradient,
    )


class _QuantizedForward:
    """Runs the GEMMs in the formats of the precision map. With three bf16 GEMMs, Megatron's own code runs."""

    snip: LinearHandle

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.snip.is_stock:
            return super()._forward_impl(input, weight, **kwargs)  # type: ignore[misc,no-any-return]
        bias, call = kwargs.get("bias"), _call(self.snip, kwargs)
        return QuantizedLinear.apply(input, weight, bias, call)  # type: ignore[no-untyped-call,no-any-return]


class SnipColumnParallelLinear(_QuantizedForward, ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear whose GEMMs follow the precision map."""


class SnipRowParallelLinear(_QuantizedForward, RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear whose GEMMs follow the precision map."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the linear, and reduce its output over tensor parallel ranks.

        Under sequence parallelism the reduction is part of the linear. One node of autograd then takes less host time
        than two. Partial sums may also be quantised before they are exchanged, and the output gradient before it is
        gathered, which Megatron's own reduction does in the training dtype.
        """
        if not self._scatters():
            return super().forward(input_)  # type: ignore[no-any-return]
        packs = torch.is_grad_enabled() and packs_gradient(self.snip, input_)
        call = _call(self.snip, {"tp_group": self.tp_group}, scatters=True, packs_gradient=packs)
        output = QuantizedLinear.apply(input_, self.weight, None, call)  # type: ignore[no-untyped-call]
        if self.skip_bias_add or self.bias is None:
            return output, self.bias if self.skip_bias_add else None
        return output + self.bias, None

    def _scatters(self) -> bool:
        """Return whether the output is reduce-scattered in a pass of training under the map, with or without gradients.

        Recomputation must repeat the forward.
        """
        shards = self.sequence_parallel and not self.explicit_expert_comm and self.snip.tp_group is not None
        if not shards or self.config.cpu_offloading or self.snip.is_stock:
            return False
        return self.snip.context.override is None and not self.snip.context.probing
