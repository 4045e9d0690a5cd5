"""Token shards of X and G in the form in which tensor parallel ranks exchange them.

The rows of a shard are consecutive tokens. If their number is a multiple of the tile, every tile of a shard is also a
tile of the whole matrix. Shards can then be quantised before they are gathered.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.products.operands import GemmOperand, UnquantizedOperand
from snip_megatron.numerics.quantize import wire
from snip_megatron.numerics.quantize.operands import Operand, quantize_operands
from snip_megatron.numerics.quantize.reference import fake_quantize
from snip_megatron.numerics.quantize.wire import side_by_side
from snip_megatron.precision import FOUR_BIT, Format


class QuantizedShard(NamedTuple):
    """A token shard of one operand.

    Attributes:
        tensors: the tensors to gather. They are contiguous and have the same shapes on all ranks.
        open: makes the operand of all tokens from the gathered tensors [ranks, \\*shape], followed by ``common``.
        common: tensors that are equal on all ranks, and therefore not gathered.
    """

    tensors: tuple[Tensor, ...]
    open: Callable[..., GemmOperand]
    common: tuple[Tensor, ...] = ()

    def opened(self, gathered: tuple[Tensor, ...]) -> GemmOperand:
        return self.open(*gathered, *self.common)


def unquantized_shard(shard: UnquantizedOperand) -> QuantizedShard:
    """Return the shard [tokens, cols] of a matrix that the reference quantises in its GEMM.

    In bf16 it is gathered as it is, and in formats of Hopper's GEMMs as theirs are. In other formats its quantised
    numbers are gathered in FP32, which saves no bytes.
    """
    x, spec, axis, fmt = shard.tensor, shard.spec, shard.axis, shard.format
    if fmt is None or fmt is Format.BF16:
        return QuantizedShard((x,), lambda whole: UnquantizedOperand(whole.flatten(0, 1), axis, spec))
    plain = spec._replace(amax=None, keys=None)  # what the numbers no longer need
    operand = quantize_operands(x, spec)[1 - axis]
    if operand is None:
        x, options = spec.of(x, axis)
        made = fake_quantize(x, **options)
        return QuantizedShard((made,), lambda whole: UnquantizedOperand(whole.flatten(0, 1), axis, plain, True))
    packed = operand_shard(operand, fmt, axis, wire)

    def opened(*tensors: Tensor) -> UnquantizedOperand:
        whole = packed.open(*tensors)
        assert isinstance(whole, Operand)
        numbers = whole.dequantize()
        return UnquantizedOperand(numbers if axis else numbers.t(), axis, plain, quantized=True)

    return packed._replace(open=opened)


def operand_shard(shard: Operand, fmt: Format, axis: int, packing: Any) -> QuantizedShard:
    """Return the shard of an operand with scales of tiles, or of a whole tensor that all ranks share.

    Args:
        shard: rows are tokens, or the reduction runs over tokens, whose number is then a multiple of 128.
        fmt: the format. Four-bit elements are packed two to a byte.
        axis: the dimension that the GEMM reduces over: 0 for tokens (wgrad), otherwise 1.
        packing: the module :mod:`snip_megatron.numerics.quantize.wire`, or its functions in Triton.
    """
    values = shard.values.view(torch.uint8)
    if fmt in FOUR_BIT:
        values = packing.pack_fp4(values)
    opened = partial(_opened_operand, shard.scaling, shard.depth, fmt, axis, packing)
    if shard.scaling == "tensor":
        return QuantizedShard((values,), opened, (shard.scale,))
    return QuantizedShard((values, shard.scale.t()), opened)


def _opened_operand(
    scaling: str, depth: int, fmt: Format, axis: int, packing: Any, values: Tensor, scale: Tensor
) -> Operand:
    """Return the operand of all tokens. ``values`` [ranks, rows, depth]; ``scale`` [ranks, tiles, rows] or [1]."""
    along_tokens = axis == 0
    parts = values if along_tokens else values.flatten(0, 1).unsqueeze(0)
    whole = packing.unpack_fp4(parts) if fmt in FOUR_BIT else side_by_side(parts)
    if scaling != "tensor":
        scale = (scale.flatten(0, 1) if along_tokens else side_by_side(scale)).t()
    return Operand(whole.view(torch.float8_e4m3fn), scale, scaling, depth * len(values) if along_tokens else depth)
