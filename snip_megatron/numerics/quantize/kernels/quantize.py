"""The quantisers of ``packed.py`` as Triton kernels: same names, arguments and results."""

import torch
from torch import Tensor

from snip_megatron.numerics.quantize import packed
from snip_megatron.numerics.quantize.kernels.arguments import (
    WIDTH,
    bits_of,
    checked,
    device_options,
    draws_of,
    memory_of,
    parts_of,
    reads_words,
    stride_of,
    tile_output,
    values_like,
    widths_of,
)
from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.kernels.programs import (
    MAXIMA,
    amax_kernel,
    block_kernel,
    tensor_kernel,
    tile_kernel,
)
from snip_megatron.numerics.quantize.kernels.rows import quantize_rows
from snip_megatron.numerics.quantize.kernels.wire import add_partials as add_partials
from snip_megatron.numerics.quantize.kernels.wire import pack_fp4 as pack_fp4
from snip_megatron.numerics.quantize.kernels.wire import unpack_fp4 as unpack_fp4
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.packed import Operand
from snip_megatron.numerics.quantize.row_map import RowMap
from snip_megatron.precision import Format

LAUNCH: dict[str, dict[str, int]] = {
    "tiles": {"num_warps": 8, "maxnreg": 64},
    "fp8 rows": {"num_warps": 8, "maxnreg": 72},  # fp8 along rows and either format along columns
    "stochastic": {"num_warps": 8, "maxnreg": 72},
    "blocks": {"num_warps": 8, "maxnreg": 64},
    "tensor": {"num_warps": 16, "maxnreg": 40},
    "amax": {"num_warps": 8, "maxnreg": 64},
}
"""Launch options of each kind of kernel (``quantize --sweep`` in benchmarks tries others): tiles do not cross warps, so
that many warps with few registers each hide each other's latency."""


def quantize_operands(
    x: Tensor, spec: OperandSpec, cached: CachedPair | None = None, rows: RowMap | None = None
) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.packed.quantize_operands`.

    One kernel reads the matrix for all operands with tiles or blocks, and one for those with a scale for the whole
    tensor, after its amax.
    """
    x = checked(x)
    if rows is not None:
        return quantize_rows(x, spec, rows)
    if not reads_words(x):  # torch quantises others
        return packed.quantize_operands(x, spec, cached)
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
    """See :func:`snip_megatron.numerics.quantize.packed.quantize_group_blocks`."""
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
