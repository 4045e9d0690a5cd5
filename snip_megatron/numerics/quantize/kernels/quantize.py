"""The quantisers of ``operands.py`` as Triton kernels: same names, arguments and results."""

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from snip_megatron.numerics.quantize import operands
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels.launch import Seen, launch
from snip_megatron.numerics.quantize.kernels.programs import (
    MAXIMA,
    amax_kernel,
    block_kernel,
    key_kernel,
    quantised_rows_kernel,
    rows_kernel,
    tensor_kernel,
    tile_kernel,
)
from snip_megatron.numerics.quantize.kernels.replay import Seed
from snip_megatron.numerics.quantize.kernels.wire import add_partials as add_partials
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
}
"""Launch options of each kind of kernel (``quantize --sweep`` in benchmarks tries others): tiles do not cross warps, so
that many warps with few registers each hide each other's latency."""


def quantize_operands(
    x: Tensor, spec: OperandSpec, cached: CachedPair | None = None, rows: RowMap | None = None
) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.operands.quantize_operands`.

    One kernel reads the matrix for all operands with tiles or blocks, and one for those with a scale for the whole
    tensor, after its amax.
    """
    x = checked(x)
    if rows is not None:
        return quantize_rows(x, spec, rows)
    if not reads_words(x):  # torch quantises others
        return operands.quantize_operands(x, spec, cached)
    row: Operand | None = None
    col: Operand | None = None
    if not WIDTH.keys().isdisjoint(spec.formats):
        row, col = _blocks(x, spec, cached) if spec.weight else _tiles(x, spec)
    if Format.FP8_TENSOR in spec.formats:
        whole = _whole(x, spec, cached)
        row, col = row or whole[0], col or whole[1]
    return (row, col) if cached is None else cached.operands


def _tiles(x: Tensor, spec: OperandSpec) -> OperandPair:
    M, K = x.shape
    row, col = tile_output(x, spec.rowwise, M, K), tile_output(x, spec.columnwise, K, M)
    if x.numel():
        draws = draws_of(spec, K, x)
        random = draws.constants["ROW_RANDOM"] or draws.constants["COL_RANDOM"]
        launch(
            tile_kernel, (parts_of(K), parts_of(M)), [(x, torch.int32), *memory_of(row, col, x), *draws.memory],
            (M, K, K // 2, stride_of(col)), (0 if spec.keys is None else spec.keys.first_row, *draws.words),
            {
                "x_stride": x.stride(0) // 2, "row_stride": stride_of(row) // 2,
                **widths_of(spec), **draws.constants, **device_options(x),
            },
            LAUNCH["stochastic" if random else "fp8 rows" if row and col and spec.rowwise is Format.FP8 else "tiles"],
        )  # fmt: skip
    return row, col


def _blocks(w: Tensor, spec: OperandSpec, cached: CachedPair | None) -> OperandPair:
    N, K = w.shape
    old = (None, None) if cached is None else cached.operands
    row, col = (
        None if fmt not in WIDTH else _block_output(w, rows, depth) if kept is None else kept
        for fmt, rows, depth, kept in zip(spec.formats, (N, K), (K, N), old, strict=True)
    )
    if w.numel():
        launch(
            block_kernel, (parts_of(K), parts_of(N)),
            [(w, torch.int32), *memory_of(row, col, w), w if cached is None else cached.current],
            (N, K, K // 2, w.stride(0) // 2, stride_of(row) // 2, stride_of(col)),
            (_scale_stride(row), _scale_stride(col)),
            {**widths_of(spec), "GROUP": 0, "GUARDED": cached is not None, **device_options(w)},
            LAUNCH["blocks"],
        )  # fmt: skip
    return row, col


def _block_output(w: Tensor, rows: int, depth: int) -> Operand:
    padded = -(-parts_of(depth) // 4) * 4
    create = torch.empty if padded == parts_of(depth) else torch.ones
    scale = create(parts_of(rows), padded, dtype=torch.float32, device=w.device)
    return Operand(values_like(w, rows, depth), scale.t(), "block", depth)


def _scale_stride(side: Operand | None) -> int:
    return 0 if side is None else side.scale.stride(1)


def _whole(x: Tensor, spec: OperandSpec, cached: CachedPair | None) -> OperandPair:
    """Quantise with one scale for the whole tensor; without its amax the matrix is read twice."""
    M, K = x.shape
    row, col = (fmt is Format.FP8_TENSOR for fmt in spec.formats)
    if cached is None:  # the scale is 1 if nothing will write it
        scale = (torch.empty if x.numel() else torch.ones)(1, dtype=torch.float32, device=x.device)
        row_side = Operand(values_like(x, M, K), scale, "tensor", K) if row else None
        col_side = Operand(values_like(x, K, M), scale, "tensor", M) if col else None
    else:
        row_side, col_side = (old if own else None for own, old in zip((row, col), cached.operands, strict=True))
    written = row_side or col_side
    if x.numel() and written is not None:
        current = None if cached is None else cached.current
        maxima = largest_magnitudes(x, current) if spec.amax is None else bits_of(spec.amax)
        row_values, _, col_values, _ = memory_of(row_side, col_side, x)
        launch(
            tensor_kernel, (parts_of(K), parts_of(M)),
            [(x, torch.int32), maxima, row_values, col_values, written.scale, maxima if current is None else current],
            (M, K, K // 2, stride_of(col_side)), (maxima.numel(),),
            {
                "x_stride": x.stride(0) // 2, "row_stride": stride_of(row_side) // 2, "ROW": row, "COL": col,
                "GUARDED": current is not None, **device_options(x),
            },
            LAUNCH["tensor"],
        )  # fmt: skip
    return row_side, col_side


def largest_magnitudes(x: Tensor, current: Tensor | None = None) -> Tensor:
    """Return the FP32 bits of max|x| over disjoint pieces of x, int32 [number of pieces]. NaN is above all numbers.

    Each program stores its maximum, so that no memory has to be zero before. The quantiser finds the largest of them.

    Args:
        x: 16-bit [M, K], not empty, K even.
        current: int32 on the device. If it is not zero, the result is not needed, and x is not read.
    """
    M, K = x.shape
    maxima = torch.empty(min(parts_of(M) * parts_of(K), MAXIMA.value), dtype=torch.int32, device=x.device)
    flag = maxima if current is None else current
    launch(
        amax_kernel, (maxima.numel(), 1), ((x, torch.int32), maxima, flag), (M, K // 2), (),
        {"x_stride": x.stride(0) // 2, "GUARDED": current is not None, **device_options(x)},
        LAUNCH["amax"],
    )  # fmt: skip
    return maxima


def pack_partial(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`snip_megatron.numerics.quantize.wire.pack_partial`."""
    made, _ = quantize_operands(x, OperandSpec(Format.FP8, None))
    return made.values.view(torch.uint8)[:, : x.shape[1]].contiguous(), made.scale.contiguous()


def quantize_group_blocks(w: Tensor, spec: OperandSpec) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.operands.quantize_group_blocks`."""
    w = w.detach()
    E, N, K = w.shape
    flat = w.view(E * N, K)
    row, col = (
        _group_output(w, rows, depth) if fmt in WIDTH else None
        for fmt, rows, depth in zip(spec.formats, (N, K), (K, N), strict=True)
    )
    launch(
        block_kernel, (parts_of(K), parts_of(E * N)), [(flat, torch.int32), *memory_of(row, col, w), flat],
        (E * N, K, K // 2, flat.stride(0) // 2, K // 2, N), (parts_of(K), parts_of(N)),
        {**widths_of(spec), "GROUP": parts_of(N), "GUARDED": False, **device_options(w)}, LAUNCH["blocks"],
    )  # fmt: skip
    return row, col


def _group_output(w: Tensor, rows: int, depth: int) -> Operand:
    experts = w.shape[0]
    scale = torch.empty(experts, parts_of(rows), parts_of(depth), dtype=torch.float32, device=w.device)
    return Operand(values_like(w, experts * rows, depth).view(experts, rows, depth), scale, "block", depth)


# -- rows of experts -------------------------------------------------------------------------------------------------
_ROWS, _COLS = 16, 512  # of a program that moves rows


def quantize_rows(x: Tensor, spec: OperandSpec, rows: RowMap) -> OperandPair:
    """Return the padded rows of x, bf16 [rows, K] and contiguous, as ``quantize_operands`` does. K is a multiple of
    128.
    """
    M, K = len(rows.experts), x.shape[1]
    row, col = tile_output(x, spec.rowwise, M, K), tile_output(x, spec.columnwise, K, M)
    if M:
        draws = draws_of(spec, K, x)
        launch(
            quantised_rows_kernel, (parts_of(K), parts_of(M)),
            [(x, torch.int32), *memory_of(row, col, x), *draws.memory, *rows], (M, K, stride_of(col)),
            (rows.table.shape[1], *draws.words),
            {
                "x_stride": x.stride(0) // 2, "row_stride": stride_of(row) // 2, **widths_of(spec), **draws.constants,
                "HARDWARE": has_hopper_instructions(x),
            },
            LAUNCH["quantised rows"],
        )  # fmt: skip
    return row, col


def pad(rows: RowMap, x: Tensor) -> Tensor:
    """See :meth:`snip_megatron.numerics.quantize.operands.RowMap.pad`."""
    return _moved(rows, x, len(rows.experts), pad=True)


def unpad(rows: RowMap, padded: Tensor, count: int) -> Tensor:
    """See :meth:`snip_megatron.numerics.quantize.operands.RowMap.unpad`."""
    return _moved(rows, padded, count, pad=False)


def _moved(rows: RowMap, x: Tensor, count: int, *, pad: bool) -> Tensor:
    to, cols, parts = x.new_empty(count, *x.shape[1:]), math.prod(x.shape[1:]), parts_of(len(rows.experts))
    if parts and cols:
        width = min(_COLS, triton.next_power_of_2(cols))
        launch(
            rows_kernel, (parts * (TILE // _ROWS), -(-cols // width)), (x.contiguous(), to, *rows), (cols,),
            (rows.table.shape[1],), {"ROWS": _ROWS, "WIDTH": width, "PAD": pad}, LAUNCH["moved rows"],
        )  # fmt: skip
    return to


# -- arguments of kernels --------------------------------------------------------------------------------------------
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


# -- keys ------------------------------------------------------------------------------------------------------------
def advance(
    state: Tensor, counts: Tensor, identities: Tensor, words: Tensor, place: int, gemms: tuple[int, int]
) -> None:
    """See :func:`snip_megatron.numerics.quantize.rounding.advance`."""
    constants = {"FIRST_MIXED": splitmix64(gemms[0]), "SECOND_MIXED": splitmix64(gemms[1])}
    launch(key_kernel, (1, 1), (state, counts, identities, words), (), (place,), constants, {"num_warps": 1})
