"""A matrix, how it is quantised in the names of formats, and the keys of a step."""

from typing import Any

import torch

from snip_megatron.numerics.quantize import derive_seeds
from snip_megatron.numerics.quantize.device_keys import DeviceKeys, LinearIdentity
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


def keys_of_a_step() -> tuple[list[int], list[torch.Tensor]]:
    """Seeds of two GEMMs, and the same as the words that a device keeps."""
    keys = DeviceKeys([LinearIdentity(4, 1, 3)], (1, 2), torch.device("cpu"))
    keys.start_step(1, 2)
    return derive_seeds((1, 2, 3, 4), (1, 2)), [word.clone() for word in keys.next(0)]
