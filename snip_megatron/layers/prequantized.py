"""A tensor that is quantised already, which a fused kernel passes to a linear in its place.

Autograd passes one tensor from a function to the next. The operands of two GEMMs are four, of other dtypes. So a fused
function passes a tensor that has the shape and dtype of the unquantised one, no numbers, and the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import flatten
from snip_megatron.numerics.quantize.operands import OperandPair
from snip_megatron.precision.errors import SnipError


class PrequantizedTensor(torch.Tensor):
    """X or G of a linear as its two operands. Every operation on it is refused."""

    operands: OperandPair

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, operands: OperandPair, shape: Sequence[int], like: Tensor) -> PrequantizedTensor:
        """Make the tensor, with the dtype and device of ``like``."""
        made: PrequantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        made.operands = operands
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse the operation, except that autograd notes the streams that use the operands.

        Raises SnipError if something else than the linear reads the tensor, or autograd adds another gradient to it.
        """
        if func is torch.ops.aten.record_stream.default:
            for tensor in flatten(args[0].operands)[0]:
                tensor.record_stream(args[1])
            return None
        raise SnipError(
            f"{func}: the input or the output gradient of a linear is quantised already and has no numbers, but a hook"
            " or another function reads or adds to it, which --snip-fusions auto does not support;"
            " use --snip-fusions none"
        )
