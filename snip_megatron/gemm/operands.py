"""The operands of a GEMM: matrices that the GEMM quantises itself, and matrices that are quantised already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
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
    """

    dgrad: Key | None
    wgrad: Key | None
    cols: Tensor
    first_row: int = 0


@dataclass(frozen=True)
class Plain:
    """A matrix that the GEMM quantises to ``format``. In bf16 it is not quantised.

    Attributes:
        tensor: [rows, cols] in the training dtype.
        format: format of the GEMM.
        seed: key of stochastic rounding; None: rounding to nearest. Only G has one.
        cols: global indices of the columns for stochastic rounding.
        amax: max|x| of the unsharded matrix if ``tensor`` is a shard (0-dim FP32). None: that of ``tensor``.
        first_row: global index of the first row for stochastic rounding.
        quantised: whether ``tensor`` holds quantised numbers in FP32 already, which the GEMM uses unchanged.
        rotation: how the matrix is transformed if ``format`` has a Hadamard transform for it.
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
"""An operand of a GEMM. Both operands of a GEMM are of the same kind."""


@dataclass(frozen=True)
class HeldSides:
    """The two operands of a weight, which stay at the same addresses from step to step for CUDA graphs.

    Attributes:
        sides: the operands of fprop and dgrad that an earlier call returned for the same weight and formats.
        current: int32 [1] on the device. If it is not zero, the operands are up to date and are not written.
    """

    sides: tuple[Side, Side]
    current: Tensor


Apart = tuple[tuple[Tensor, ...], Callable[..., Any]]
"""An operand taken apart: its tensors, and a function that makes the operand from these tensors again."""


def disassemble(side: Side) -> Apart:
    """Take an operand of X or W apart, so that autograd can save it.

    Operands that differ in their tensors alone get one function, by which a replay finds its recording.
    """
    if isinstance(side, Operand):
        return (side.values, side.scale), _maker(Operand, scaling=side.scaling, depth=side.depth)
    if isinstance(side, ExactOperand):
        if side.scale is None:
            return (side.values,), _maker(ExactOperand, scale=None, tile=None)
        return (side.values, side.scale), _maker(ExactOperand, tile=side.tile)
    if isinstance(side, NativeOperand):
        return side.tensors, partial(_native, replace(side, tensors=()))
    make = _maker if side.rotation is None else partial  # a rotation may hold a tensor
    tensors = (side.tensor,) if side.amax is None else (side.tensor, side.amax)
    return tensors, make(_plain, format=side.format, rotation=side.rotation)


@lru_cache(maxsize=4096)
def _maker(kind: Callable[..., Side], **attributes: Any) -> Callable[..., Side]:
    return partial(kind, **attributes)


def _native(side: NativeOperand, *tensors: Tensor) -> NativeOperand:
    return replace(side, tensors=tensors)


def _plain(tensor: Tensor, amax: Tensor | None = None, *, format: Format, rotation: Rotation | None) -> Plain:
    return Plain(tensor, format, amax=amax, rotation=rotation)
