# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Functions of ``ranges.py`` in Triton: same arguments and bits. Import it only where Triton can run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from snip_megatron.precision import FOUR_BIT, Format
from snip_megatron.quantization import packed
from snip_megatron.quantization.formats import SPECS, TILE
from snip_megatron.quantization.kernels.arguments import has_hopper_instructions
from snip_megatron.quantization.kernels.elements import byte_of, bytes_of, magnitude_bits, nearest_e2m1, to_float32
from snip_megatron.quantization.kernels.fours import pack_fours
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.packed import Operand
from snip_megatron.quantization.ranges import QuantizedWeight, tile_counts

_BLOCK = 1024  # columns of a program
_SIDE = 64  # of the square that a program transposes
# Without fusion: a fused multiply-add would round another number to E4M3 than the reference does.
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["start", "count", "above"])
def range_amax_kernel(x_ptr, amax_ptr, cols, tiles, start, count, above):
    """Write the bits of max|x| of what a 128×128 tile has in the range."""
    tile = above + tl.program_id(0).to(tl.int64)
    row = tile * 128 + tl.arange(0, 128)
    col = tl.program_id(1) * 128 + tl.arange(0, 128)
    place = row[:, None] * cols + col[None, :] - start
    inside = (col < cols)[None, :] & (place >= 0) & (place < count)
    x = to_float32(tl.load(x_ptr + place, mask=inside, other=0.0))
    tl.store(amax_ptr + tile * tiles + tl.program_id(1), tl.max(tl.max(magnitude_bits(x), axis=1), axis=0))


@triton.jit(do_not_specialize=["start", "count", "above"])
def encode_range_kernel(
    x_ptr, scale_ptr, out_ptr, cols, tiles, start, count, above,
    FORMAT: tl.constexpr, TILED: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise ``BLOCK`` columns of a row to E4M3 bytes, as far as they are in the range."""
    row = above + tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row * cols + col - start
    inside = (col < cols) & (place >= 0) & (place < count)
    x = to_float32(tl.load(x_ptr + place, mask=inside, other=0.0))
    if TILED:
        scale = tl.load(scale_ptr + (row // 128) * tiles + col // 128, mask=col < cols, other=1.0)
    else:
        scale = tl.load(scale_ptr) + tl.zeros_like(x)
    y = tl.div_rn(x, scale)
    if FORMAT == 4:  # a zero keeps its sign
        code = (byte_of(nearest_e2m1(y, "fp32", HARDWARE)) & 0x7F) | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)
    else:
        code, _ = bytes_of(y, y, False, HARDWARE)
    tl.store(out_ptr + place, code.to(tl.uint8), mask=inside)


def range_amax(x: Tensor, start: int, shape: tuple[int, int], format: Format) -> Tensor:
    """See :func:`snip_megatron.quantization.ranges.range_amax`."""
    tile, (_, cols) = SPECS[format].tile, shape
    if not tile:
        whole: Tensor = torch.linalg.vector_norm(x.detach(), float("inf"), dtype=torch.float32)
        return whole.view(1, 1)
    amax = torch.zeros(tile_counts(shape, format), dtype=torch.int32, device=x.device)
    above, below = start // cols // tile, -(-(start + x.numel()) // (cols * tile))
    tiles = amax.shape[1]
    launch(
        range_amax_kernel, (below - above, tiles), (x, amax), (x.dtype, amax.dtype), (cols, tiles),
        (start, x.numel(), above), {}, LAUNCH,
    )  # fmt: skip
    return amax.view(torch.float32)


def encode_range(x: Tensor, start: int, shape: tuple[int, int], format: Format, scale: Tensor) -> Tensor:
    """See :func:`snip_megatron.quantization.ranges.encode_range`."""
    four, (_, cols), count = format in FOUR_BIT, shape, x.numel()
    codes = torch.zeros(count + count % 2 if four else count, dtype=torch.uint8, device=x.device)
    scale = scale.contiguous()
    above, below = start // cols, -(-(start + count) // cols)
    block = min(_BLOCK, triton.next_power_of_2(cols))
    launch(
        encode_range_kernel, (below - above, -(-cols // block)), (x, scale, codes), (x.dtype, scale.dtype, codes.dtype),
        (cols, scale.shape[1]), (start, count, above),
        {
            "FORMAT": 4 if four else 8, "TILED": SPECS[format].tile > 0, "HARDWARE": has_hopper_instructions(x),
            "BLOCK": block,
        },
        LAUNCH,
    )  # fmt: skip
    return pack_fours(codes.view(1, -1)).view(-1) if four else codes


@triton.jit
def transpose_kernel(values_ptr, out_ptr, rows, cols, depth, UNSIGNED: tl.constexpr, SIDE: tl.constexpr):
    """Transpose bytes [rows, cols] to [cols, depth]. ``UNSIGNED``: negative zeros of E4M3 become zeros."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    col = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    values = tl.load(values_ptr + row[:, None] * cols + col[None, :], mask=inside, other=0)
    if UNSIGNED:
        values = tl.where(values == 0x80, 0, values).to(tl.uint8)
    padded = (col < cols)[:, None] & (row < depth)[None, :]
    tl.store(out_ptr + col[:, None] * depth + row[None, :], tl.trans(values), mask=padded)


def opened_weight(weight: QuantizedWeight, format: Format, *, transposed: bool = False) -> Operand:
    """See :func:`snip_megatron.quantization.packed.opened_weight`."""
    if not transposed:
        return packed.opened_weight(weight, format)
    rows, cols = weight.elements.shape
    depth = -(-rows // TILE) * TILE
    values = torch.empty(cols, depth, dtype=torch.uint8, device=weight.elements.device)
    launch(
        transpose_kernel, (depth // _SIDE, -(-cols // _SIDE)), (weight.elements, values), (torch.uint8, torch.uint8),
        (rows, cols, depth), (), {"UNSIGNED": format in FOUR_BIT, "SIDE": _SIDE}, LAUNCH,
    )  # fmt: skip
    return packed.weight_operand(values.view(torch.float8_e4m3fn), weight, format, transposed=True)
