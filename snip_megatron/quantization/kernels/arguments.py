"""Arguments of the quantisers' kernels: memory of results, key words, and what a device can run."""

from __future__ import annotations

import functools
import weakref

import torch
import triton
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import TILE
from snip_megatron.quantization.kernels.replay import Seed
from snip_megatron.quantization.packed import Operand, stored_format
from snip_megatron.quantization.rounding import Key, key_words

WIDTH = {Format.FP8: 8, Format.FP4: 4}
# Of values and scales: a kernel writes values along rows as pairs of bytes.
ROW_TYPES, COL_TYPES = (torch.int16, torch.float32), (torch.uint8, torch.float32)
_PAIRED: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}
"""id(ids of columns) → (the ids, their version, whether they are pairs (2i, 2i + 1)).

It is looked up for every gradient. torch's ``WeakIdKeyDictionary`` would create three weak references for that.
"""


def parts_of(size: int) -> int:
    """Return the number of 128-long parts that cover ``size``."""
    return -(-size // TILE)


def values_like(x: Tensor, rows: int, depth: int) -> Tensor:
    """Return memory on x's device for the values [rows, depth padded] of an operand."""
    return torch.empty(rows, parts_of(depth) * TILE, dtype=torch.float8_e4m3fn, device=x.device)


def tile_output(x: Tensor, format: Format | str | None, rows: int, depth: int) -> tuple[Operand | None, int]:
    """Return memory for an operand in tiles, and its number of bits; None and 0 if there is no format."""
    if format is None:
        return None, 0
    width = WIDTH.get(format) or WIDTH[stored_format(format)]  # type: ignore[call-overload]
    scale = torch.empty_strided((rows, parts_of(depth)), (1, rows), dtype=torch.float32, device=x.device)
    return Operand(values_like(x, rows, depth), scale, "tile", depth), width


def memory_of(side: Operand | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for values and scales. It is arbitrary memory if the operand is not requested."""
    return (unused, unused) if side is None else (side.values, side.scale)


def types_of(side: Operand | None, types: tuple[torch.dtype, torch.dtype], unused: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes under which a kernel sees the memory of :func:`memory_of`."""
    return (unused.dtype, unused.dtype) if side is None else types


def stride_of(side: Operand | None) -> int:
    """Return the stride of the rows of an operand in bytes; 0 if there is none."""
    return 0 if side is None else side.values.stride(0)


def key_arguments(seed: Key | Seed | None) -> list[int]:
    """Return the seed's key words as signed 32-bit numbers, so that all seeds have one kernel signature."""
    if isinstance(seed, Seed):
        return [*seed.words]
    if seed is None or isinstance(seed, Tensor):
        return [0, 0]
    return [word - (word >> 31 << 32) for word in key_words(seed)]


def key_memory(seed: Key | None, unused: Tensor) -> Tensor:
    """Return the key words on the device, or arbitrary memory if they are passed as arguments."""
    return seed if isinstance(seed, Tensor) else unused


def are_pairs(cols: Tensor) -> bool:
    """Return whether neighbouring columns are pairs (2i, 2i + 1). The ids are inspected on the device once."""
    known = _PAIRED.get(id(cols))
    if known is None or known[0]() is not cols or known[1] != cols._version:
        even, odd = cols[: cols.numel() // 2 * 2].view(-1, 2).unbind(1)
        paired = bool(((cols[::2] % 2 == 0).all() & (odd == even + 1).all()).item())
        key = id(cols)
        known = _PAIRED[key] = (weakref.ref(cols, lambda _: _PAIRED.pop(key, None)), cols._version, paired)
    return known[2]


def has_hopper_instructions(x: Tensor) -> bool:
    """Return whether the device has Hopper's instructions on pairs.

    Without them (Triton's interpreter, older GPUs) the kernels build bytes from FP32 bits.
    """
    return x.is_cuda and not triton.knobs.runtime.interpret and _is_hopper(x.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
