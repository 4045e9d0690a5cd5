"""What a GEMM is given: a matrix that is still to be quantised, or one that a kernel has quantised already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from snip_megatron.gemm.blackwell_engine import NativeOperand
from snip_megatron.precision import Format
from snip_megatron.quantization.exact import ExactOperand
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.packed import Operand
from snip_megatron.quantization.rounding import Key


@dataclass(frozen=True)
class GradientKeys:
    """Keys of stochastic rounding of G: counters only, so that recomputation and resharding draw the same bits.

    Attributes:
        dgrad, wgrad: of the two GEMMs that read G: 64-bit seeds, or key words on the device; None: neither rounds
            stochastically.
        cols: integer [N local], global indices of G's columns.
        first_row: index of G's first row among the rows of the GEMM, if G is a token shard.
    """

    dgrad: Key | None
    wgrad: Key | None
    cols: Tensor
    first_row: int = 0


@dataclass(frozen=True)
class Plain:
    """A matrix as training made it; the GEMM that gets it quantises it to ``format`` (bf16: not at all).

    Attributes:
        tensor: [rows, cols] in the training dtype.
        format: of the GEMM.
        seed, cols: key of stochastic rounding, for G only.
        amax: max|x| of the whole matrix where ``tensor`` is a shard of it (0-dim FP32); None: that of ``tensor``.
        first_row: index of the first row for stochastic rounding.
        quantised: whether ``tensor`` holds quantised numbers in FP32, which the GEMM takes as they are.
        rotation: how a wgrad in a format with a Hadamard transform transforms it.
    """

    tensor: Tensor
    format: Format
    seed: Key | None = None
    cols: Tensor | None = None
    amax: Tensor | None = None
    first_row: int = 0
    quantised: bool = False
    rotation: Rotation | None = None


Side = Plain | Operand | ExactOperand | NativeOperand
"""One of a GEMM's two operands. Both of a GEMM are of the same kind."""


@dataclass(frozen=True)
class HeldSides:
    """A weight's two operands, kept from step to step: :class:`snip_megatron.quantization.packed.Held` of any kind.

    Attributes:
        sides: for fprop and dgrad, as an earlier call gave them for the same weight and formats.
        current: int32 [1] on the device; where it is not zero, they hold the weight as it is and stay.
    """

    sides: tuple[Side, Side]
    current: Tensor


def disassemble(side: Side) -> tuple[tuple[Tensor, ...], Callable[..., Side]]:
    """The tensors of an operand of X or W, for autograd to save, and what makes the operand of them again."""
    if isinstance(side, Operand):
        return (side.values, side.scale), partial(Operand, scaling=side.scaling, depth=side.depth)
    if isinstance(side, ExactOperand):
        if side.scale is None:
            return (side.values,), partial(ExactOperand, scale=None, tile=None)
        return (side.values, side.scale), partial(ExactOperand, tile=side.tile)
    if isinstance(side, NativeOperand):
        return side.tensors, partial(_native, replace(side, tensors=()))
    if side.amax is None:
        return (side.tensor,), partial(Plain, format=side.format, rotation=side.rotation)
    return (side.tensor, side.amax), partial(_plain_shard, side.format, side.rotation)


def _native(side: NativeOperand, *tensors: Tensor) -> NativeOperand:
    return replace(side, tensors=tensors)


def _plain_shard(format: Format, rotation: Rotation | None, tensor: Tensor, amax: Tensor) -> Plain:
    return Plain(tensor, format, amax=amax, rotation=rotation)
