"""Packing of two E2M1 numbers into a byte, for the exchange of four-bit operands between ranks. In plain torch.

:mod:`snip_megatron.quantization.kernels.fours` has the same functions in Triton, with the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_fours(values: Tensor) -> Tensor:
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


def unpack_fours(parts: Tensor) -> Tensor:
    """Undo :func:`pack_fours`, and set the matrices of several ranks side by side.

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
