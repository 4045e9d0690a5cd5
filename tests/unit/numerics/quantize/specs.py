"""A matrix, and how it is quantised in the names of formats."""

from typing import Any

import torch

from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format


def spec(
    row: str | None,
    col: str | None = None,
    *,
    row_seed: Any = None,
    col_seed: Any = None,
    first_row: int = 0,
    cols: torch.Tensor | None = None,
    **more: Any,
) -> OperandSpec:
    formats = (None if name is None else Format(name) for name in (row, col))
    keys = GradientKeys(row_seed, col_seed, cols, first_row, paired=cols is None)
    return OperandSpec(*formats, keys=None if row_seed is col_seed is None else keys, **more)


def matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """bf16, with rows of very different size."""
    generator = torch.Generator().manual_seed(rows + cols + seed)
    spread = torch.randn(rows, 1, generator=generator).mul(3).exp()
    return (torch.randn(rows, cols, generator=generator) * spread).bfloat16()
