"""Arguments of the quantisers' kernels: memory of results, key words, and what a device can run."""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels.launch import Seen
from snip_megatron.numerics.quantize.kernels.replay import Seed
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.numerics.quantize.packed import Operand
from snip_megatron.numerics.quantize.reference import check_matrix
from snip_megatron.numerics.quantize.rounding import Key, key_words
from snip_megatron.precision import Format

WIDTH: dict[Format | None, int] = {Format.FP8: 8, Format.FP4: 4}
"""Bits of an element of the formats with tiles; a kernel takes 0 for an operand that is left out."""


def checked(x: Tensor) -> Tensor:
    """Return x with contiguous rows and without a gradient. Raises SnipError if it is no matrix of floats."""
    check_matrix(x)
    x = x.detach()
    return x if x.stride(1) == 1 else x.contiguous()


def reads_words(x: Tensor) -> bool:
    """Return whether kernels may read x [M, K], contiguous rows, as words of two 16-bit numbers.

    They may not read a single row, a number for which Triton compiles a kernel of its own: ptxas 12.8 knows that the
    rows beside it are zero, and stores two of four bytes of their E4M3 zeros from a register that nothing has written.
    """
    even = x.stride(0) % 2 == 0 and x.shape[1] % 2 == 0 and x.storage_offset() % 2 == 0
    return even and x.element_size() == 2 and x.shape[0] != 1


def bits_of(amax: Tensor) -> Tensor:
    """Return the FP32 bits of a magnitude, int32 [1]."""
    return amax.detach().to(torch.float32).reshape(1).view(torch.int32)


def parts_of(size: int) -> int:
    """Return the number of 128-long parts that cover ``size``."""
    return -(-size // TILE)


# -- results -------------------------------------------------------------------------------------------------------
def values_like(x: Tensor, rows: int, depth: int) -> Tensor:
    """Return memory on x's device for the values [rows, depth padded] of an operand."""
    return torch.empty(rows, parts_of(depth) * TILE, dtype=torch.float8_e4m3fn, device=x.device)


def tile_output(x: Tensor, format: Format | None, rows: int, depth: int) -> Operand | None:
    """Return memory for an operand in tiles; None if it is left out."""
    if format not in WIDTH:
        return None
    parts = parts_of(depth)
    # One column more: cuBLASLt reads the scales after the last ones, which it does not use.
    scale = torch.empty_strided((rows, parts + 1), (1, rows), dtype=torch.float32, device=x.device)[:, :parts]
    return Operand(values_like(x, rows, depth), scale, "tile", depth)


def widths_of(spec: OperandSpec) -> dict[str, object]:
    """Return the bits of an element of both operands; 0 for one that is left out."""
    return {name: WIDTH.get(fmt, 0) for name, fmt in zip(("ROW", "COL"), spec.formats, strict=True)}


def memory_of(row: Operand | None, col: Operand | None, unused: Tensor) -> list[Tensor | Seen]:
    """Return memory for values and scales of both operands; arbitrary memory for one that is left out.

    A kernel writes values along rows as pairs of bytes.
    """
    found: list[Tensor | Seen] = []
    for side, dtype in ((row, torch.int16), (col, torch.uint8)):
        found += [unused, unused] if side is None else [(side.values, dtype), side.scale]
    return found


def stride_of(side: Operand | None) -> int:
    """Return the stride of the rows of an operand in bytes; 0 if there is none."""
    return 0 if side is None else side.values.stride(0)


# -- stochastic rounding ---------------------------------------------------------------------------------------------
class Draws(NamedTuple):
    """How both operands of a matrix are rounded stochastically.

    Attributes:
        memory: ids of columns and key words of both operands on the device; arbitrary memory for what is not read.
        words: key words of both operands as numbers.
    """

    memory: tuple[Tensor, Tensor, Tensor]
    words: tuple[int, ...]
    constants: dict[str, bool]


def draws_of(spec: OperandSpec, columns: int, unused: Tensor) -> Draws:
    """Return the arguments of stochastic rounding of a matrix with ``columns`` columns."""
    seeds = spec.seeds
    cols, paired = unused, True  # one kernel with and without ids of columns
    if spec.keys is not None and any(seed is not None for seed in seeds):
        if spec.keys.cols is None:
            cols = torch.arange(columns, device=unused.device)
        else:
            cols, paired = spec.keys.cols, spec.keys.paired
    row_key, col_key = (key_memory(seed, unused) for seed in seeds)
    constants = {
        "ROW_RANDOM": seeds[0] is not None, "COL_RANDOM": seeds[1] is not None,
        "LOADED": row_key is not unused or col_key is not unused, "PAIRED": paired,
    }  # fmt: skip
    return Draws((cols, row_key, col_key), (*key_arguments(seeds[0]), *key_arguments(seeds[1])), constants)


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


# -- devices -----------------------------------------------------------------------------------------------------------
def device_options(x: Tensor) -> dict[str, object]:
    """Return the constants of a kernel that depend on the dtype and the device of x."""
    return {"DTYPE": "bf16" if x.dtype is torch.bfloat16 else "fp16", "HARDWARE": has_hopper_instructions(x)}


def has_hopper_instructions(x: Tensor) -> bool:
    """Return whether the device has Hopper's instructions on pairs.

    Without them (Triton's interpreter, older GPUs) the kernels build bytes from FP32 bits.
    """
    return x.is_cuda and not triton.knobs.runtime.interpret and _is_hopper(x.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
