"""Random signs of gradient errors: a function of (seed, global row, global column).

Every sharding of a weight gets the same signs, and ``kernels/programs.py`` computes the same bits. Each row and each
column has a word, the finaliser of MurmurHash3 applied to its id. For an element, two multiplications mix the exclusive
or of its two words, and the upper bit is the sign.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.rounding import MASK32, ROW_STEP, derive_seed, mix32

Words = Callable[[int, Tensor, Tensor, torch.device], tuple[Tensor, Tensor]]
"""A function with the arguments and results of :func:`words`."""

# Repeated in kernels/programs.py, because device code cannot read the constants of a module.
_FIRST, _SECOND = 0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32)


def words(seed: int, rows: Tensor, cols: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return one int32 word on ``device`` for each row and one for each column, whose global ids in [0, 2^32), 1-D in
    any order, are given.
    """
    return _mixed(derive_seed(seed, 0), rows.to(device)), _mixed(derive_seed(seed, 1), cols.to(device))


class KeptWords:
    """The words of the parameters of a run. A rank always holds the same rows and columns of each.

    Ids are copied to the device once, because a copy waits for all work that runs there.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, seed: int, rows: Tensor, cols: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return :func:`words`, computed once for each ``seed``, which belongs to one parameter."""
        found = self._kept.get(seed)
        if found is None:
            found = self._kept[seed] = words(seed, rows, cols, device)
        return found


def error_signs(seed: int, rows: Tensor, cols: Tensor) -> Tensor:
    """Return ±1 with equal probability, float32 [len(rows), len(cols)]."""
    row_words, col_words = words(seed, rows, cols, rows.device)
    h = (row_words[:, None] ^ col_words) * _FIRST  # int32 arithmetic wraps, as the hash modulo 2^32 requires
    h ^= (h >> 15) & 0x1FFFF  # the mask makes the shift a logical one
    return (h.mul_(_SECOND) >> 31).mul_(2).add_(1).to(torch.float32)


def _mixed(seed: int, ids: Tensor) -> Tensor:
    return mix32((ids.long() * ROW_STEP + (seed & MASK32)) & MASK32).to(torch.int32)
