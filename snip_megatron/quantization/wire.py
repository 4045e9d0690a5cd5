"""Quantised matrices as the bytes that ranks exchange: elements in 8 or 4 bits, and scales as their format stores them.

Decoding gives the numbers of :func:`snip_megatron.quantization.fake_quantize`, bit for bit. The reference GEMMs use
this module, for all formats. The operands of Hopper's GEMMs have this form already
(:mod:`snip_megatron.quantization.packed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import E2M1, SPECS, FormatSpec, Scaling
from snip_megatron.quantization.fours import pack_fours, unpack_fours
from snip_megatron.quantization.reference import Quantized, quantize

_SCALE_BYTES = {Scaling.FP32: 4, Scaling.FP32_TENSOR: 0, Scaling.E4M3_FP32: 1, Scaling.E8M0: 1}
_LOWEST_E8M0 = 0x00400000  # 2^-127 in FP32, which is subnormal there


@dataclass(frozen=True)
class WireMatrix:
    """A quantised matrix [rows, cols]. Concatenated along rows, the tensors of several matrices form one matrix.

    Attributes:
        elements: uint8 [rows, cols] (E4M3) or [rows, ceil(cols/2)] (E2M1, see :func:`~.fours.pack_fours`).
        scales: scales of the tiles: FP32, or uint8 for E4M3 and E8M0. None if the whole tensor has one scale.
        tensor_scale: 0-dim FP32, the scale of the whole tensor. None if the format has none.
    """

    elements: Tensor
    scales: Tensor | None
    tensor_scale: Tensor | None


def bytes_per_element(format: Format | None, *, unquantised: int = 2) -> float:
    """Return the bytes of an element with its share of the scales; 0 for None.

    ``unquantised`` is the number of bytes in bf16, where elements stay in the training dtype.
    """
    if format is None:
        return 0.0
    if format is Format.BF16:
        return float(unquantised)
    spec = SPECS[format]
    element = 0.5 if spec.element is E2M1 else 1.0
    return element + (_SCALE_BYTES[spec.scaling] / spec.tile if spec.tile else 0.0)


def encode(x: Tensor, format: Format, axis: int, **options: Any) -> WireMatrix:
    """Quantise ``x`` [rows, cols] in tiles along ``axis`` (0 or 1).

    The other arguments are those of :func:`snip_megatron.quantization.quantize`. If tiles run along the rows, the
    number of rows must be a multiple of the tile for parts to be concatenated.
    """
    spec = SPECS[format]
    q = quantize(x, format, axis=axis, **options)
    values = q.values.to(torch.float8_e4m3fn).view(torch.uint8)
    if spec.element is E2M1:
        values = pack_fours(functional.pad(values, (0, values.shape[1] % 2)))
    if spec.scaling is Scaling.FP32_TENSOR:
        return WireMatrix(values, None, q.scale.reshape(-1)[0])
    if spec.scaling is Scaling.E8M0:
        return WireMatrix(values, (q.scale.view(torch.int32) >> 23).to(torch.uint8), None)
    if spec.scaling is Scaling.FP32:
        return WireMatrix(values, q.scale.contiguous(), None)
    assert q.factors is not None
    tile_scale, tensor_scale = q.factors
    return WireMatrix(values, tile_scale.to(torch.float8_e4m3fn).view(torch.uint8), tensor_scale)


def decode(matrix: WireMatrix, format: Format, axis: int, cols: int) -> Tensor:
    """Return the numbers of a matrix that :func:`encode` made, FP32 [rows, cols]."""
    spec, elements = SPECS[format], matrix.elements
    if spec.element is E2M1:
        elements = unpack_fours(elements.unsqueeze(0))[:, :cols]
    values = elements.view(torch.float8_e4m3fn).to(torch.float32)
    if matrix.scales is None:
        assert matrix.tensor_scale is not None
        return values * matrix.tensor_scale
    return Quantized(values, _scales(matrix, spec), spec.tile_shape(axis, block=False)).dequantize()


def _scales(matrix: WireMatrix, spec: FormatSpec) -> Tensor:
    assert matrix.scales is not None
    if spec.scaling is Scaling.FP32:
        return matrix.scales
    if spec.scaling is Scaling.E4M3_FP32:
        assert matrix.tensor_scale is not None
        return matrix.scales.view(torch.float8_e4m3fn).to(torch.float32) * matrix.tensor_scale
    bits = matrix.scales.to(torch.int32) << 23
    power = torch.where(bits == 0, _LOWEST_E8M0, bits).view(torch.float32)
    return torch.where(matrix.scales == 0xFF, torch.nan, power)
