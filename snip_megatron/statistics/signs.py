"""Random signs of gradient errors: a function of (seed, global row, global column), so that every sharding of a weight
draws the same. ``triton_drift_kernel.py`` computes the same bits.

Rows and columns have a word each (MurmurHash3's finaliser of their ids); where they meet, two multiplications mix the
words' exclusive or. The upper bit is the sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snip_megatron.quantization import derive_seed

_MASK = 0xFFFFFFFF
# Written out again in triton_drift_kernel.py, whose device code can read no module.
_FIRST, _SECOND = 0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32)


def words(seed: int, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """One int32 word for each row and each column; ids are 1-D integer tensors in [0, 2^32), in any order."""
    return _mixed(derive_seed(seed, 0), rows), _mixed(derive_seed(seed, 1), cols)


def error_signs(seed: int, rows: Tensor, cols: Tensor) -> Tensor:
    """float32 [len(rows), len(cols)] of ±1 with equal probability."""
    row_words, col_words = words(seed, rows, cols)
    h = (row_words[:, None] ^ col_words) * _FIRST  # int32 arithmetic wraps: the hash is defined modulo 2^32
    h ^= (h >> 15) & 0x1FFFF  # the mask makes the shift a logical one
    return (h.mul_(_SECOND) >> 31).mul_(2).add_(1).to(torch.float32)


def _mixed(seed: int, ids: Tensor) -> Tensor:
    h = (ids.long() * 0x9E3779B1 + (seed & _MASK)) & _MASK
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return (h ^ (h >> 16)).to(torch.int32)
