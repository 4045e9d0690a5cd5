"""The operands of a GEMM, and how a matrix is quantised for the two GEMMs that read it.

A linear reads each of its matrices for two GEMMs. The *rowwise* operand is that of the GEMM that reduces over the
columns of the matrix, the *columnwise* operand that of the GEMM that reduces over its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from snip_megatron.gemm.blackwell_engine import NativeOperand
from snip_megatron.precision import Format
from snip_megatron.quantization.exact import ExactOperand
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.packed import Operand
from snip_megatron.quantization.rounding import Key


class GradientKeys(NamedTuple):
    """Keys of the stochastic rounding of G. Every backward makes one, and a tuple is made faster than a dataclass.

    The random bits are a function of the key and of the global position of an element. Recomputation and other parallel
    layouts therefore draw the same bits.

    Attributes:
        dgrad, wgrad: keys of the two GEMMs that read G. A key is a 64-bit seed, or key words on the device. None: the
            GEMM does not round stochastically.
        cols: integer [N local], global indices of G's columns.
        first_row: global index of G's first row. It is 0 unless G is a token shard.
        paired: whether neighbouring columns are pairs (2i, 2i + 1), for which kernels are others.
    """

    dgrad: Key | None
    wgrad: Key | None
    cols: Tensor
    first_row: int = 0
    paired: bool | None = None


class OperandSpec(NamedTuple):
    """How a matrix is quantised for the two GEMMs that read it.

    Attributes:
        rowwise, columnwise: formats of the two GEMMs; None if a GEMM does not run.
        weight: whether the matrix is a weight, which is quantised in blocks instead of tiles.
        amax: max|·| of the unsharded matrix, 0-dim FP32. It is required if the matrix is a shard and a format has one
            scale for the whole tensor.
        keys: keys of stochastic rounding; None unless the matrix is G.
        rotation: how the columnwise operand is transformed if its format has a Hadamard transform; None: with key 0.
    """

    rowwise: Format | None
    columnwise: Format | None
    weight: bool = False
    amax: Tensor | None = None
    keys: GradientKeys | None = None
    rotation: Rotation | None = None


class UnquantizedOperand(NamedTuple):
    """A matrix that the GEMM quantises to ``format``. In bf16 it is not quantised.

    Attributes:
        tensor: [rows, cols] in the training dtype.
        format: format of the GEMM.
        seed: key of stochastic rounding; None: rounding to nearest. Only G has one.
        cols: global indices of the columns for stochastic rounding.
        amax: max|x| of the unsharded matrix if ``tensor`` is a shard (0-dim FP32). None: that of ``tensor``.
        first_row: global index of the first row for stochastic rounding.
        quantized: whether ``tensor`` holds quantised numbers in FP32 already, which the GEMM uses unchanged.
        rotation: how the matrix is transformed if ``format`` has a Hadamard transform for it.
    """

    tensor: Tensor
    format: Format
    seed: Key | None = None
    cols: Tensor | None = None
    amax: Tensor | None = None
    first_row: int = 0
    quantized: bool = False
    rotation: Rotation | None = None


GemmOperand = UnquantizedOperand | Operand | ExactOperand | NativeOperand
"""An operand of a GEMM. Both operands of a GEMM are of the same class."""
OperandPair = tuple[Any, Any]
"""The rowwise and the columnwise operand of a matrix, each a :data:`GemmOperand`; None for a GEMM that does not run."""


@dataclass(frozen=True)
class CachedPair:
    """The two operands of a weight, which stay at the same addresses from step to step for CUDA graphs.

    Attributes:
        operands: what an earlier call returned for the same weight and formats.
        current: int32 [1] on the device. If it is not zero, the operands are up to date and are not written.
    """

    operands: OperandPair
    current: Tensor


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
