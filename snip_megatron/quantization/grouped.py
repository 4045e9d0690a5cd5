"""Operands of grouped GEMMs on Hopper: where the rows of experts are, and the blocks of :mod:`.packed` of all weights.

The layouts are DeepGEMM's. Rows are ordered by expert, and every expert has a multiple of 128 of them.
``kernels/grouped.py`` quantises weights in Triton, with the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snip_megatron.quantization.formats import TILE
from snip_megatron.quantization.operands import OperandPair, OperandSpec
from snip_megatron.quantization.packed import Operand, quantize_operands


class GroupRows(NamedTuple):
    """Where the rows of each expert are. Tensors are int32 on the device of the rows.

    Attributes:
        splits: number of rows of each expert, multiples of 128.
        counts: the same numbers, [experts].
        experts: the expert of every row, [rows].
    """

    splits: tuple[int, ...]
    counts: Tensor
    experts: Tensor


@functools.lru_cache(maxsize=16)  # fc1 and fc2 of a layer have the same rows, in forward and backward
def group_rows(splits: tuple[int, ...], device: torch.device) -> GroupRows:
    """Describe the rows of experts, with one copy to the device."""
    counts = torch.tensor(splits, dtype=torch.int32).to(device, non_blocking=True)
    numbers = torch.arange(len(splits), dtype=torch.int32, device=device)
    return GroupRows(splits, counts, torch.repeat_interleave(numbers, counts, output_size=sum(splits)))


def quantize_group_blocks(w: Tensor, spec: OperandSpec) -> OperandPair:
    """Quantise weights [experts, N, K] in 128×128 blocks; N and K are multiples of 128.

    Returns:
        The rowwise operand: values [experts, N, K], scale [experts, N/128, K/128], and the columnwise one: values
        [experts, K, N], scale [experts, K/128, N/128]. All are contiguous.
    """
    rowwise, columnwise = zip(*(quantize_operands(each, spec) for each in w), strict=True)
    return _stacked(rowwise), _stacked(columnwise)


def _stacked(sides: Sequence[Operand | None]) -> Operand | None:
    found = [side for side in sides if side is not None]
    if not found:
        return None
    scales = [side.scale.t()[:, : side.values.shape[1] // TILE] for side in found]
    return Operand(torch.stack([side.values for side in found]), torch.stack(scales), "block", found[0].depth)
