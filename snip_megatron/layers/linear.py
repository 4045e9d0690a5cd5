"""Megatron's parallel linears with quantised GEMMs.

Instances are made by converting built ones (``module.__class__ = …``), so there is no ``__init__`` here and no new
parameter: checkpoints interchange with Megatron's own.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from snip_megatron.errors import SnipError
from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle

# Arguments of Megatron's GEMM that our autograd function does not implement, with the values it may ignore.
_MUST_BE_DEFAULT: dict[str, tuple[Any, ...]] = {
    "grad_output_buffer": (None,),
    "wgrad_deferral_limit": (None, 0),
    "gtp_remat_size": (None, 0, 1),
    "async_grad_allreduce": (None,),
    "output_dtype": (None,),
}
_HANDLED = {"bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group"}


def quantized_forward(
    handle: LinearHandle, input_: torch.Tensor, weight: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Run one linear through :class:`QuantizedLinear` with the arguments Megatron gives its own GEMM.

    Raises:
        SnipError: Megatron asks for something that the quantised path does not implement.
    """
    for name, value in kwargs.items():
        if name in _HANDLED:
            continue
        if name not in _MUST_BE_DEFAULT or not any(value is default for default in _MUST_BE_DEFAULT[name]):
            raise SnipError(
                f"{handle.name}: Megatron asks for {name}={value!r}, which quantised linears do not support"
            )
    forcing = handle.context.forcing
    call = LinearCall(
        handle=handle,
        backend=handle.context.backend,
        sequence_parallel=bool(kwargs.get("sequence_parallel", False)),
        allreduce_dgrad=bool(kwargs.get("allreduce_dgrad", False)),
        tp_group=kwargs.get("tp_group"),
        has_backward=torch.is_grad_enabled(),
        forced=None if forcing is None else forcing(handle),
    )
    return QuantizedLinear.apply(input_, weight, kwargs.get("bias"), call)  # type: ignore[no-untyped-call,no-any-return]


class SnipColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Column-parallel linear whose GEMMs follow the precision map; an all-bf16 linear is Megatron's own, bitwise."""

    snip: LinearHandle

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.snip.is_stock:
            return super()._forward_impl(input, weight, **kwargs)  # type: ignore[no-any-return]
        return quantized_forward(self.snip, input, weight, kwargs)


class SnipRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Row-parallel linear whose GEMMs follow the precision map; an all-bf16 linear is Megatron's own, bitwise."""

    snip: LinearHandle

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.snip.is_stock:
            return super()._forward_impl(input, weight, **kwargs)  # type: ignore[no-any-return]
        return quantized_forward(self.snip, input, weight, kwargs)
