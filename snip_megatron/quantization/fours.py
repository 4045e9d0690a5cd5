"""Two E2M1 numbers in a byte, in plain torch: the form in which ranks exchange four-bit operands.

:mod:`snip_megatron.quantization.kernels.fours` has the same functions in Triton, with the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_fours(values: Tensor) -> Tensor:
    """Pack E2M1 numbers that are stored as E4M3.

    Args:
        values: bytes of E4M3 numbers that E2M1 has too, uint8 [R, C] with an even C, contiguous. A NaN becomes some
            number: E2M1 has no NaN, and the scale of its tile is one.

    Returns:
        uint8 [R, C/2]: codes of E2M1 (a sign bit and the index of the magnitude), those of even columns in the lower
        half of a byte.
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
        bytes of E4M3 numbers, uint8 [R, P·C].
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
