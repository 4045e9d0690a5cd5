"""What ranks exchange, in plain torch: fp4 numbers, two to a byte, and partial sums of matrices.

Each of R ranks may hold a term of a sum of matrices, and want some rows of the sum. A rank quantises its term to FP8
(E4M3) with one FP32 scale for each 1×128 tile, sends every other rank the rows that this one wants, and adds what it
gets in FP32 in the order of the ranks. Rows that a rank keeps are not sent, so that they are not quantised. Tiles run
along a row, so that no choice of rows cuts them.

:mod:`snip_megatron.numerics.quantize.kernels.wire` has the functions of packed fp4 and of partial sums in Triton.
"""

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import E2M1, SPECS, TILE, Scaling
from snip_megatron.numerics.quantize.reference import Quantized, quantize
from snip_megatron.precision import Format

_SCALE_BYTES = {Scaling.FP32: 4, Scaling.FP32_TENSOR: 0, Scaling.E4M3_FP32: 1, Scaling.E8M0: 1}


# -- packed fp4 --------------------------------------------------------------------------------------------------------
def pack_fp4(values: Tensor) -> Tensor:
    """Pack E2M1 numbers that are stored as E4M3.

    Args:
        values: uint8 [R, C], contiguous, C even: bytes of E4M3 numbers that are also E2M1 numbers. A NaN becomes an
            arbitrary number, because E2M1 has no NaN. The scale of its tile is NaN.

    Returns:
        uint8 [R, C/2]. A byte holds the E2M1 code (a sign bit and the index of the magnitude) of an even column in its
        lower half and that of the next column in its upper half.
    """
    magnitude = values & 0x7F
    # Bytes 0x38, 0x3C, … 0x4C are 1, 1.5, 2, 3, 4, 6, with the indices 2 … 7. 0x30 is 0.5, with the index 1.
    index = torch.where(magnitude >= 0x38, (magnitude >> 2) - 12, (magnitude >> 4) & 1) & 7
    codes = index | ((values >> 4) & 8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_fp4(parts: Tensor) -> Tensor:
    """Undo :func:`pack_fp4`, and set the matrices of several ranks side by side.

    Args:
        parts: uint8 [P, R, C/2], packed matrices of P ranks, contiguous.

    Returns:
        uint8 [R, P·C], bytes of E4M3 numbers.
    """
    codes = torch.stack((parts & 0xF, parts >> 4), -1).flatten(-2)
    index = codes & 7
    magnitude = torch.where(index >= 2, (index + 12) << 2, index * 0x30)
    return side_by_side(magnitude | ((codes & 8) << 4))


def side_by_side(parts: Tensor) -> Tensor:
    """Return the P matrices of ``parts`` [P, R, C] side by side, [R, P·C]. One matrix is returned without a copy."""
    if parts.shape[0] == 1:
        return parts[0]
    if parts.element_size() == 1 and parts.shape[2] % 8 == 0:  # a copy moves words instead of bytes
        return side_by_side(parts.view(torch.int64)).view(parts.dtype)
    return torch.cat(parts.unbind(), 1)


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


# -- partial sums ------------------------------------------------------------------------------------------------------
def pack_partial(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a partial sum, to nearest.

    Args:
        x: fp32, bf16 or fp16 [rows, cols].

    Returns:
        The elements, uint8 [rows, cols], and the scales of the tiles, FP32 [rows, ceil(cols/128)]; both contiguous. A
        tile that holds a NaN or an Inf has a scale that is NaN.
    """
    q = quantize(x, Format.FP8, axis=1)
    return q.values.to(torch.float8_e4m3fn).view(torch.uint8), q.scale.contiguous()


def add_partials(elements: Tensor, scales: Tensor, own: Tensor, rank: int) -> Tensor:
    """Return the sum of the rows that all ranks hold.

    Terms are converted to FP32 and added in the order of the ranks. The sum is rounded once.

    Args:
        elements: uint8 [ranks, rows, cols], of :func:`pack_partial` on each rank. Those of ``rank`` are not read.
        scales: FP32 [ranks, rows, ceil(cols/128)].
        own: this rank's own rows [rows, cols], as they are.
        rank: this rank.

    Returns:
        [rows, cols] in the dtype of ``own``.
    """
    terms = [
        own.to(torch.float32)
        if place == rank
        else Quantized(values.view(torch.float8_e4m3fn).to(torch.float32), scale, (1, TILE)).dequantize()
        for place, (values, scale) in enumerate(zip(elements, scales, strict=True))
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.to(own.dtype)
