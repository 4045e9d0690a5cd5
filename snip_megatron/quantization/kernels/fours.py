# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The functions of ``fours.py`` as Triton kernels: same arguments and bytes. Import it only where Triton can run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from snip_megatron.quantization.kernels.launch import launch

_BLOCK = 2048
_LAUNCH = {"num_warps": 4}


@triton.jit
def pack_kernel(values_ptr, packed_ptr, count, BLOCK: tl.constexpr):
    """Pack ``count`` pairs of E4M3 bytes, each read as one 16-bit word."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(values_ptr + i, mask=i < count, other=0).to(tl.int32)
    tl.store(packed_ptr + i, (_code(pair) | (_code(pair >> 8) << 4)).to(tl.uint8), mask=i < count)


@triton.jit
def _code(value):
    magnitude = value & 0x7F
    index = tl.where(magnitude >= 0x38, (magnitude >> 2) - 12, (magnitude >> 4) & 1) & 7
    return index | ((value >> 4) & 8)


@triton.jit
def unpack_kernel(parts_ptr, values_ptr, columns, rows, ranks, BLOCK: tl.constexpr):
    """Unpack a piece of one row of [ranks, rows, columns] bytes to 16-bit words [rows, ranks, columns]."""
    source = tl.program_id(0).to(tl.int64)
    rank, row = source // rows, source % rows
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(parts_ptr + source * columns + i, mask=i < columns, other=0).to(tl.int32)
    pair = _value(byte) | (_value(byte >> 4) << 8)
    tl.store(values_ptr + (row * ranks + rank) * columns + i, pair.to(tl.int16), mask=i < columns)


@triton.jit
def _value(code):
    index = code & 7
    magnitude = tl.where(index >= 2, (index + 12) << 2, index * 0x30)
    return magnitude | ((code & 8) << 4)


def pack_fours(values: Tensor) -> Tensor:
    """See :func:`snip_megatron.quantization.fours.pack_fours`."""
    rows, columns = values.shape
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=values.device)
    count = packed.numel()
    if count:
        launch(
            pack_kernel, (-(-count // _BLOCK), 1), (values, packed), (torch.int16, torch.uint8), (count,), (),
            {"BLOCK": _BLOCK}, _LAUNCH,
        )  # fmt: skip
    return packed


def unpack_fours(parts: Tensor) -> Tensor:
    """See :func:`snip_megatron.quantization.fours.unpack_fours`."""
    ranks, rows, columns = parts.shape
    values = torch.empty(rows, ranks * columns * 2, dtype=torch.uint8, device=parts.device)
    if parts.numel():
        block = min(_BLOCK, triton.next_power_of_2(columns))
        launch(
            unpack_kernel, (ranks * rows, -(-columns // block)), (parts, values), (torch.uint8, torch.int16),
            (columns, rows, ranks), (), {"BLOCK": block}, _LAUNCH,
        )  # fmt: skip
    return values
