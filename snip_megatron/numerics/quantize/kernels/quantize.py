"""The quantisers of ``operands.py`` as Triton kernels: same names, arguments and results."""

import functools
import math

import torch
import triton
from torch import Tensor

from snip_megatron.numerics.quantize import operands
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels.launch import TypedTensor, launch
from snip_megatron.numerics.quantize.kernels.programs import (
    MAXIMA,
    amax_kernel,
    block_kernel,
    key_kernel,
    quantised_rows_kernel,
    row_map_kernel,
    rows_kernel,
    tensor_kernel,
    tile_kernel,
)
from snip_megatron.numerics.quantize.kernels.replay import Seed
from snip_megatron.numerics.quantize.operands import CachedPair, Operand, OperandPair, OperandSpec, RowMap
from snip_megatron.numerics.quantize.reference import check_matrix
from snip_megatron.numerics.quantize.rounding import Key, key_words, splitmix64
from snip_megatron.precision import Format

LAUNCH: dict[str, dict[str, int]] = {
    "tiles": {"num_warps": 8, "maxnreg": 64},
    "fp8 rows": {"num_warps": 8, "maxnreg": 72},  # fp8 along rows and either format along columns
    "stochastic": {"num_warps": 8, "maxnreg": 72},
    "blocks": {"num_warps": 8, "maxnreg": 64},
    "tensor": {"num_warps": 16, "maxnreg": 40},
    "amax": {"num_warps": 8, "maxnreg": 64},
    "quantised rows": {"num_warps": 8, "maxnreg": 64},
    "moved rows": {"num_warps": 4},
    "row map": {"num_warps": 4},
}
"""Launch options of each kind of kernel. ``benchmarks.kernels.quantize --sweep`` tries others. No tile crosses warps:
many warps with few registers each hide each other's latency."""


def quantize_operands(
    x: Tensor, spec: OperandSpec, cached: CachedPair | None = None, rows: RowMap | None = None
) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.operands.quantize_operands`. One kernel makes both operands."""
    x = checked_matrix(x)
    if rows is not None:
        return _tiles(x, spec, rows)
    if not reads_pairs(x):  # torch quantises others
        return operands.quantize_operands(x, spec, cached)
    row: Operand | None = None
    col: Operand | None = None
    if not BITS.keys().isdisjoint(spec.formats):
        row, col = _blocks(x, spec, cached) if spec.weight else _tiles(x, spec)
    if Format.FP8_TENSOR in spec.formats:
        by_tensor = _per_tensor(x, spec, cached)
        row, col = row or by_tensor[0], col or by_tensor[1]
    return (row, col) if cached is None else cached.operands


def _tiles(x: Tensor, spec: OperandSpec, rows: RowMap | None = None) -> OperandPair:
    """Quantise x [M, K] in tiles, or the padded rows of experts, where x is contiguous and K a multiple of 128."""
    M, K = x.shape[0] if rows is None else len(rows.experts), x.shape[1]
    row, col = empty_tiles(x, spec.rowwise, M, K), empty_tiles(x, spec.columnwise, K, M)
    if not (M and K):
        return row, col
    keys, words, random = rounding_arguments(spec, K, x)
    memory = [(x, torch.int32), *output_arguments(row, col, x), *keys]
    constants = {
        "x_stride": x.stride(0) // 2, "row_stride": row_stride(row) // 2,
        **element_bits(spec), **random, "HARDWARE": has_hopper_instructions(x),
    }  # fmt: skip
    grid = tile_count(K), tile_count(M)
    if rows is not None:
        launch(
            quantised_rows_kernel, grid, [*memory, *rows], (M, K, row_stride(col)),
            (rows.table.shape[1], *words), constants, LAUNCH["quantised rows"],
        )  # fmt: skip
        return row, col
    kind = "fp8 rows" if row and col and spec.rowwise is Format.FP8 else "tiles"
    if random["ROW_RANDOM"] or random["COL_RANDOM"]:
        kind = "stochastic"
    first_row = 0 if spec.keys is None else spec.keys.first_row
    numbers, counters = (M, K, K // 2, row_stride(col)), (first_row, *words)
    launch(tile_kernel, grid, memory, numbers, counters, constants, LAUNCH[kind])
    return row, col


def _blocks(w: Tensor, spec: OperandSpec, cached: CachedPair | None) -> OperandPair:
    """Quantise a weight [N, K], or one of each expert [E, N, K]."""
    *experts, N, K = w.shape
    old = (None, None) if cached is None else cached.operands
    row, col = (
        None if fmt not in BITS else _block_output(w, rows, depth) if output is None else output
        for fmt, rows, depth, output in zip(spec.formats, (N, K), (K, N), old, strict=True)
    )
    if w.numel():
        flat = w.view(-1, K) if experts else w
        launch(
            block_kernel, (tile_count(K), tile_count(len(flat))),
            [(flat, torch.int32), *output_arguments(row, col, flat), flat if cached is None else cached.current],
            (len(flat), K, K // 2, flat.stride(0) // 2, row_stride(row) // 2, row_stride(col)),
            (_scale_stride(row), _scale_stride(col)),
            {
                **element_bits(spec), "GROUP": tile_count(N) if experts else 0, "GUARDED": cached is not None,
                "HARDWARE": has_hopper_instructions(w),
            },
            LAUNCH["blocks"],
        )  # fmt: skip
    return row, col


def _block_output(w: Tensor, rows: int, depth: int) -> Operand:
    tiles = tile_count(depth)
    if w.dim() == 3:
        scale = torch.empty(len(w), tile_count(rows), tiles, dtype=torch.float32, device=w.device)
        return Operand(empty_values(w, len(w) * rows, depth).view(-1, rows, depth), scale, "block", depth)
    padded = -(-tiles // 4) * 4
    create = torch.empty if padded == tiles else torch.ones
    scale = create(tile_count(rows), padded, dtype=torch.float32, device=w.device)
    return Operand(empty_values(w, rows, depth), scale.t(), "block", depth)


def _scale_stride(side: Operand | None) -> int:
    return 0 if side is None else side.scale.stride(1)


def _per_tensor(x: Tensor, spec: OperandSpec, cached: CachedPair | None) -> OperandPair:
    """Quantise with one scale for the whole tensor. If its amax is unknown, the matrix is read twice."""
    M, K = x.shape
    row: Operand | None
    col: Operand | None
    by_row, by_column = (fmt is Format.FP8_TENSOR for fmt in spec.formats)
    if cached is None:  # the scale is 1 if no kernel writes it
        scale = (torch.empty if x.numel() else torch.ones)(1, dtype=torch.float32, device=x.device)
        row = Operand(empty_values(x, M, K), scale, "tensor", K) if by_row else None
        col = Operand(empty_values(x, K, M), scale, "tensor", M) if by_column else None
    else:
        row, col = cached.operands[0] if by_row else None, cached.operands[1] if by_column else None
    output = row or col
    if x.numel() and output is not None:
        current = None if cached is None else cached.current
        maxima = largest_magnitudes(x, current) if spec.amax is None else amax_bits(spec.amax)
        row_values, _, col_values, _ = output_arguments(row, col, x)
        launch(
            tensor_kernel, (tile_count(K), tile_count(M)),
            [(x, torch.int32), maxima, row_values, col_values, output.scale, maxima if current is None else current],
            (M, K, K // 2, row_stride(col)), (maxima.numel(),),
            {
                "x_stride": x.stride(0) // 2, "row_stride": row_stride(row) // 2, "ROW": by_row, "COL": by_column,
                "GUARDED": current is not None, "HARDWARE": has_hopper_instructions(x),
            },
            LAUNCH["tensor"],
        )  # fmt: skip
    return row, col


def largest_magnitudes(x: Tensor, current: Tensor | None = None) -> Tensor:
    """Return the FP32 bits of max|x| over pieces of bf16 x, int32 [number of pieces]. NaN is above all numbers.

    The quantiser finds the largest of them. If ``current``, int32 on the device, is not zero, x is not read.
    """
    M, K = x.shape
    maxima = torch.empty(min(tile_count(M) * tile_count(K), MAXIMA.value), dtype=torch.int32, device=x.device)
    flag = maxima if current is None else current
    launch(
        amax_kernel, (maxima.numel(), 1), ((x, torch.int32), maxima, flag), (M, K // 2), (),
        {"x_stride": x.stride(0) // 2, "GUARDED": current is not None, "HARDWARE": has_hopper_instructions(x)},
        LAUNCH["amax"],
    )  # fmt: skip
    return maxima


def quantize_group_blocks(w: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.operands.quantize_group_blocks`."""
    return _blocks(w.detach(), spec, cached)


# -- rows of experts -------------------------------------------------------------------------------------------------
_ROWS, _COLS = 16, 512  # of a program that moves rows


def of_counts(counts: Tensor, rows: int, *, backwards: bool) -> RowMap:
    """See :meth:`snip_megatron.numerics.quantize.operands.RowMap.of_counts`. ``rows`` is a multiple of 128, not 0."""
    row_map = RowMap(counts.new_empty(rows, dtype=torch.int32), counts.new_empty(4, len(counts), dtype=torch.int32))
    launch(
        row_map_kernel, (rows // TILE, 1), (counts, *row_map), (), (len(counts),),
        {"SIZE": triton.next_power_of_2(len(counts)), "BACKWARDS": backwards}, LAUNCH["row map"],
    )  # fmt: skip
    return row_map


def pad(rows: RowMap, x: Tensor) -> Tensor:
    """See :meth:`snip_megatron.numerics.quantize.operands.RowMap.pad`."""
    return _moved(rows, x, len(rows.experts), pad=True)


def unpad(rows: RowMap, padded: Tensor, count: int) -> Tensor:
    """See :meth:`snip_megatron.numerics.quantize.operands.RowMap.unpad`."""
    return _moved(rows, padded, count, pad=False)


def _moved(rows: RowMap, x: Tensor, count: int, *, pad: bool) -> Tensor:
    to, cols, parts = x.new_empty(count, *x.shape[1:]), math.prod(x.shape[1:]), tile_count(len(rows.experts))
    if parts and cols:
        width = min(_COLS, triton.next_power_of_2(cols))
        launch(
            rows_kernel, (parts * (TILE // _ROWS), -(-cols // width)), (x.contiguous(), to, *rows), (cols,),
            (rows.table.shape[1],), {"ROWS": _ROWS, "WIDTH": width, "PAD": pad}, LAUNCH["moved rows"],
        )  # fmt: skip
    return to


# -- arguments of kernels --------------------------------------------------------------------------------------------
BITS: dict[Format | None, int] = {Format.FP8: 8, Format.FP4: 4}
"""Bits of an element of the formats with tiles. A kernel takes 0 for an operand that is not computed."""


def checked_matrix(x: Tensor) -> Tensor:
    """Return x with contiguous rows and without a gradient. Raises SnipError if it is no matrix of floats."""
    check_matrix(x)
    x = x.detach()
    return x if x.stride(1) == 1 else x.contiguous()


def reads_pairs(x: Tensor) -> bool:
    """Return whether kernels may read x [M, K], contiguous rows, as words of two bf16 numbers.

    They may not read a single row, a number for which Triton compiles a kernel of its own: ptxas 12.8 knows that the
    rows beside it are zero, and stores two of four bytes of their E4M3 zeros from a register that nothing has written.
    """
    even = x.stride(0) % 2 == 0 and x.shape[1] % 2 == 0 and x.storage_offset() % 2 == 0
    return even and x.dtype is torch.bfloat16 and x.shape[0] != 1


def amax_bits(amax: Tensor) -> Tensor:
    """Return the FP32 bits of an amax, int32 [1]."""
    return amax.detach().to(torch.float32).reshape(1).view(torch.int32)


def tile_count(size: int) -> int:
    """Return the number of tiles of 128 that cover ``size``."""
    return -(-size // TILE)


def empty_values(x: Tensor, rows: int, depth: int) -> Tensor:
    """Return memory on x's device for the values [rows, depth padded] of an operand."""
    return torch.empty(rows, tile_count(depth) * TILE, dtype=torch.float8_e4m3fn, device=x.device)


def empty_tiles(x: Tensor, format: Format | None, rows: int, depth: int) -> Operand | None:
    """Return memory for an operand in tiles, or None if its format has none."""
    if format not in BITS:
        return None
    tiles = tile_count(depth)
    # One column more: cuBLASLt reads the scales after the last ones, which it does not use.
    scale = torch.empty_strided((rows, tiles + 1), (1, rows), dtype=torch.float32, device=x.device)[:, :tiles]
    return Operand(empty_values(x, rows, depth), scale, "tile", depth)


def element_bits(spec: OperandSpec) -> dict[str, object]:
    """Return the constants ``ROW`` and ``COL`` of kernels."""
    return {"ROW": BITS.get(spec.rowwise, 0), "COL": BITS.get(spec.columnwise, 0)}


def output_arguments(row: Operand | None, col: Operand | None, unused: Tensor) -> list[Tensor | TypedTensor]:
    """Return the values and the scales of both operands. ``unused`` stands for an operand that is not computed."""
    arguments: list[Tensor | TypedTensor] = []
    for operand, dtype in ((row, torch.int16), (col, torch.uint8)):  # values along rows are pairs of bytes
        arguments += [unused, unused] if operand is None else [(operand.values, dtype), operand.scale]
    return arguments


def row_stride(operand: Operand | None) -> int:
    """Return the stride of the rows of an operand in bytes, or 0 for None."""
    return 0 if operand is None else operand.values.stride(-2)


def rounding_arguments(
    spec: OperandSpec, columns: int, unused: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, ...], dict[str, bool]]:
    """Return a kernel's arguments for the stochastic rounding of a matrix with ``columns`` columns: memory with the ids
    of columns and both keys, the words of keys that are numbers, and constants.
    """
    seeds = spec.seeds
    cols, paired = unused, True  # without stochastic rounding one kernel serves all columns
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
    return (cols, row_key, col_key), (*key_numbers(seeds[0]), *key_numbers(seeds[1])), constants


def key_numbers(seed: Key | Seed | None) -> list[int]:
    """Return the seed's key words as signed 32-bit numbers, so that all seeds have one kernel signature."""
    if isinstance(seed, Seed):
        return [*seed.words]
    if seed is None or isinstance(seed, Tensor):
        return [0, 0]
    return [word - (word >> 31 << 32) for word in key_words(seed)]


def key_memory(seed: Key | None, unused: Tensor) -> Tensor:
    """Return the key words on the device, or ``unused`` if they are passed as numbers."""
    return seed if isinstance(seed, Tensor) else unused


def has_hopper_instructions(x: Tensor) -> bool:
    """Return whether the device has Hopper's instructions on pairs, as older GPUs and the interpreter have not."""
    return x.is_cuda and not triton.knobs.runtime.interpret and _is_hopper(x.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


# -- keys ------------------------------------------------------------------------------------------------------------
def advance(
    state: Tensor, counts: Tensor, identities: Tensor, words: Tensor, place: int, gemms: tuple[int, int]
) -> None:
    """See :func:`snip_megatron.numerics.quantize.device_keys.advance`."""
    constants = {"FIRST_MIXED": splitmix64(gemms[0]), "SECOND_MIXED": splitmix64(gemms[1])}
    launch(key_kernel, (1, 1), (state, counts, identities, words), (), (place,), constants, {"num_warps": 1})
