"""What a GEMM is given: a matrix that is still to be quantised, or one that a kernel has quantised already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from snip_megatron.gemm.blackwell_engine import NativeOperand
from snip_megatron.precision import Format
from snip_megatron.quantization.packed import Operand


@dataclass(frozen=True)
class GradientKeys:
    """Keys of stochastic rounding of G: counters only, so that recomputation and resharding draw the same bits.

    Attributes:
        dgrad, wgrad: 64-bit seeds of the two GEMMs that read G.
        cols: integer [N local], global indices of G's columns.
    """

    dgrad: int
    wgrad: int
    cols: Tensor


@dataclass(frozen=True)
class Plain:
    """A matrix as training made it; the GEMM that gets it quantises it to ``format`` (bf16: not at all).

    Attributes:
        tensor: [rows, cols] in the training dtype.
        format: of the GEMM.
        seed, cols: key of stochastic rounding, for G only.
        amax: max|x| of the whole matrix where ``tensor`` is a shard of it (0-dim FP32); None: that of ``tensor``.
    """

    tensor: Tensor
    format: Format
    seed: int | None = None
    cols: Tensor | None = None
    amax: Tensor | None = None


Side = Plain | Operand | NativeOperand
"""One of a GEMM's two operands. Both of a GEMM are of the same kind."""


def disassemble(side: Side) -> tuple[tuple[Tensor, ...], Callable[..., Side]]:
    """The tensors of an operand of X or W, for autograd to save, and what makes the operand of them again."""
    if isinstance(side, Operand):
        return (side.values, side.scale), partial(Operand, scaling=side.scaling, depth=side.depth)
    if isinstance(side, NativeOperand):
        return side.tensors, partial(_native, replace(side, tensors=()))
    if side.amax is None:
        return (side.tensor,), partial(Plain, format=side.format)
    return (side.tensor, side.amax), partial(_plain_shard, side.format)


def _native(side: NativeOperand, *tensors: Tensor) -> NativeOperand:
    return replace(side, tensors=tensors)


def _plain_shard(format: Format, tensor: Tensor, amax: Tensor) -> Plain:
    return Plain(tensor, format, amax=amax)
