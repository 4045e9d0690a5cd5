"""Token shards of X and G in the form in which tensor parallel ranks exchange them.

The rows of a shard are consecutive tokens. If their number is a multiple of the tile, every tile of a shard is also a
tile of the whole matrix. Shards can then be quantised before they are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from snip_megatron.gemm.operands import Plain, Side
from snip_megatron.gemm.reference import gradient_rounding
from snip_megatron.precision import FOUR_BIT, Format
from snip_megatron.quantization.packed import Operand
from snip_megatron.quantization.wire import WireMatrix, decode, encode, side_by_side


@dataclass(frozen=True)
class Parcel:
    """A token shard of one operand.

    Attributes:
        tensors: the tensors to gather. They are contiguous and have the same shapes on all ranks.
        open: makes the operand of all tokens from the gathered tensors [ranks, \\*shape], followed by ``common``.
        common: tensors that are equal on all ranks, and therefore not gathered.
    """

    tensors: tuple[Tensor, ...]
    open: Callable[..., Side]
    common: tuple[Tensor, ...] = ()

    def opened(self, gathered: tuple[Tensor, ...]) -> Side:
        """Return the operand of all tokens."""
        return self.open(*gathered, *self.common)


def disassemble_parcel(parcel: Parcel) -> tuple[tuple[Tensor, ...], Callable[..., Parcel]]:
    """Take a parcel apart, so that autograd can save it. Returns its tensors, and a function that makes it again."""
    return (*parcel.tensors, *parcel.common), partial(_assembled, parcel.open, len(parcel.tensors))


def _assembled(open: Callable[..., Side], sent: int, *tensors: Tensor) -> Parcel:
    return Parcel(tensors[:sent], open, tensors[sent:])


# -- matrices that GEMMs quantise themselves ---------------------------------------------------------------------------
def plain_parcel(shard: Plain, axis: int) -> Parcel:
    """Return the parcel of a matrix that is not quantised yet. In bf16 it is gathered as it is.

    Args:
        shard: [tokens, cols].
        axis: the dimension that the GEMM reduces over: 0 for tokens (wgrad), otherwise 1.
    """
    fmt = shard.format
    if fmt is Format.BF16:
        return Parcel((shard.tensor,), _opened_plain)
    options: dict[str, Any] = {"tensor_amax": shard.amax}
    if shard.seed is not None:
        options |= gradient_rounding(fmt, shard.seed, (shard.first_row, 0), cols=shard.cols)
    made = encode(shard.tensor, fmt, axis, **options)
    sent = (made.elements,) if made.scales is None else (made.elements, made.scales)
    common = () if made.tensor_scale is None else (made.tensor_scale,)
    return Parcel(sent, partial(_opened_wire, fmt, axis, shard.tensor.shape[1], len(sent)), common)


def _opened_plain(tensor: Tensor) -> Plain:
    return Plain(tensor.flatten(0, 1), Format.BF16)


def _opened_wire(fmt: Format, axis: int, cols: int, sent: int, *tensors: Tensor) -> Plain:
    elements, *scales = (t.flatten(0, 1) for t in tensors[:sent])
    common = tensors[sent] if len(tensors) > sent else None
    numbers = decode(WireMatrix(elements, scales[0] if scales else None, common), fmt, axis, cols)
    return Plain(numbers, fmt, quantised=True)


# -- operands of Hopper's GEMMs ----------------------------------------------------------------------------------------
class Packing(Protocol):
    """The functions of :mod:`snip_megatron.quantization.wire`, in torch or in Triton."""

    pack_fp4: Callable[..., Tensor]
    unpack_fp4: Callable[..., Tensor]


def operand_parcel(shard: Operand, fmt: Format, axis: int, packing: Packing) -> Parcel:
    """Return the parcel of an operand with scales of tiles, or of a whole tensor that all ranks share.

    Args:
        shard: rows are tokens, or the reduction runs over tokens, whose number is then a multiple of 128.
        fmt: the format. Four-bit elements are packed two to a byte.
        axis: as in :func:`plain_parcel`.
        packing: the functions that pack them.
    """
    values = shard.values.view(torch.uint8)
    if fmt in FOUR_BIT:
        values = packing.pack_fp4(values)
    opened = partial(_opened_operand, shard.scaling, shard.depth, fmt, axis, packing)
    if shard.scaling == "tensor":
        return Parcel((values,), opened, (shard.scale,))
    return Parcel((values, shard.scale.t()), opened)


def _opened_operand(
    scaling: str, depth: int, fmt: Format, axis: int, packing: Packing, values: Tensor, scale: Tensor
) -> Operand:
    """Return the operand of all tokens. ``values`` [ranks, rows, depth]; ``scale`` [ranks, tiles, rows] or [1]."""
    along_tokens = axis == 0
    parts = values if along_tokens else values.flatten(0, 1).unsqueeze(0)
    whole = packing.unpack_fp4(parts) if fmt in FOUR_BIT else side_by_side(parts)
    if scaling != "tensor":
        scale = (scale.flatten(0, 1) if along_tokens else side_by_side(scale)).t()
    return Operand(whole.view(torch.float8_e4m3fn), scale, scaling, depth * len(values) if along_tokens else depth)
