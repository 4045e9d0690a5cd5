# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The functions of ``../partial_sums.py`` in Triton, with the same bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels.device import to_float32
from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.kernels.quantize import quantize_operands
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format

_TILES = 16  # tiles of a program
# Without fusion: a fused multiply-add would not round the product of an element and its scale, as the reference does.
LAUNCH = {"sums": {"num_warps": 4, "enable_fp_fusion": False}}


@triton.jit
def add_kernel(
    elements_ptr, scales_ptr, local_ptr, out_ptr, rows, columns, tiles, local_stride, rank,
    RANKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Add ``TILES`` tiles of one row over ``RANKS`` matrices of ``rows`` rows."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    i = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = i < columns
    local_rows = to_float32(tl.load(local_ptr + row * local_stride + i, mask=inside, other=0.0))
    total = tl.zeros([TILES, 128], dtype=tl.float32)
    for source in range(RANKS):
        source_row = source * rows + row
        element = tl.load(elements_ptr + source_row * columns + i, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scales_ptr + source_row * tiles + tile, mask=tile < tiles, other=0.0)
        term = tl.where(source == rank, local_rows, _e4m3(element) * scale[:, None])
        total = tl.where(source == 0, term, total + term)
    _store(out_ptr + row * columns + i, total, inside)


@triton.jit
def _e4m3(byte):
    """Return the E4M3 number of a byte. Its bits are those of an FP32 number whose exponent has another bias."""
    magnitude = byte & 0x7F
    number = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    number = tl.where(magnitude == 0x7F, float("nan"), number)
    return tl.where(byte > 0x7F, -number, number)


@triton.jit
def _store(pointers, total, inside):
    if pointers.dtype.element_ty == tl.bfloat16:  # in integers, because the interpreter does not round to nearest even
        bits = total.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        halves = tl.where(total != total, 0x7FC0, rounded).to(tl.uint16)
        tl.store(pointers, halves.to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(pointers, total.to(pointers.dtype.element_ty), mask=inside)


def pack_partial(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`snip_megatron.numerics.quantize.partial_sums.pack_partial`."""
    operand, _ = quantize_operands(x, OperandSpec(Format.FP8, None))
    return operand.values.view(torch.uint8)[:, : x.shape[1]].contiguous(), operand.scale.contiguous()


def add_partials(elements: Tensor, scales: Tensor, local_rows: Tensor, rank: int) -> Tensor:
    """See :func:`snip_megatron.numerics.quantize.partial_sums.add_partials`."""
    ranks, rows, columns = elements.shape
    out = torch.empty(rows, columns, dtype=local_rows.dtype, device=local_rows.device)
    if out.numel():
        tiles = -(-columns // TILE)
        count = min(_TILES, triton.next_power_of_2(tiles))
        launch(
            add_kernel, (rows, -(-tiles // count)), (elements, scales, local_rows, out),
            (rows, columns, tiles, local_rows.stride(0), rank), (), {"RANKS": ranks, "TILES": count}, LAUNCH["sums"],
        )  # fmt: skip
    return out
