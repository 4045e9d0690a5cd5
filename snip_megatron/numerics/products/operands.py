"""The operands of a GEMM, and how autograd saves them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from snip_megatron.numerics.quantize.operands import ExactOperand, Operand, OperandSpec
from snip_megatron.precision import Format


class UnquantizedOperand(NamedTuple):
    """A matrix that the GEMM quantises. In bf16 it is not quantised.

    Attributes:
        tensor: [rows, cols] in the training dtype.
        axis: the dimension that the GEMM reduces over: 1 for the rowwise operand, 0 for the columnwise one.
    """

    tensor: Tensor
    axis: int
    spec: OperandSpec

    @property
    def format(self) -> Format | None:
        return self.spec.formats[1 - self.axis]


GemmOperand = UnquantizedOperand | Operand | ExactOperand
"""An operand of a GEMM. Both operands of a GEMM are of the same class."""


FlatOperand = tuple[tuple[Tensor, ...], Any]
"""A flattened operand: its tensors, which autograd can save, and the operand with ``...`` in their places."""


def flatten(operand: Any) -> FlatOperand:
    """Take an operand apart, so that autograd can save its tensors."""
    tensors: list[Tensor] = []
    rest = _without_tensors(operand, tensors)
    return tuple(tensors), rest


def assemble(flat: FlatOperand) -> Any:
    """Return the operand that :func:`flatten` took apart."""
    tensors, rest = flat
    return _with_tensors(rest, iter(tensors))


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ...
    if isinstance(value, tuple):
        return tuple.__new__(type(value), [_without_tensors(each, tensors) for each in value])
    return value


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    if value is ...:
        return next(tensors)
    if isinstance(value, tuple):
        return tuple.__new__(type(value), [_with_tensors(each, tensors) for each in value])
    return value
