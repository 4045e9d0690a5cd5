# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that loads and stores parts of a matrix, and the bits of their numbers in memory and in registers.

A part has the shape [rows, columns]. A thread accesses eight 16-bit numbers at once.
"""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.elements import lift_of, to_float32
from snip_megatron.quantization.kernels.exact_numbers import inverse_power, largest


@triton.jit
def _places(
    stride: tl.constexpr, M, K: tl.constexpr, m, k, SECOND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Return the places of part (m, k) in a matrix and whether they are inside. A thread gets ``WIDE`` columns.

    A thread accesses eight 16-bit numbers at once. With ``WIDE`` 16 the places are therefore those of the first or
    ``SECOND`` eight columns of each sixteen, [R, C / 16, 8].
    """
    i = tl.arange(0, R)
    first = m.to(tl.int64) * R * stride
    if WIDE == 16:
        j = k * C + 8 * SECOND + tl.arange(0, C // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
        places = tl.max_contiguous(first + i[:, None, None] * stride + j[None, :, :], [1, 1, 8])
        return places, (m * R + i < M)[:, None, None] & (j < K)[None, :, :]
    else:
        j = k * C + tl.arange(0, C)
        places = tl.max_contiguous(first + i[:, None] * stride + j[None, :], [1, WIDE])
        return places, (m * R + i < M)[:, None] & (j < K)[None, :]


@triton.jit
def load_part(
    x_ptr, x_stride: tl.constexpr, M, K: tl.constexpr, m, k, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr
):
    """Return part (m, k) of a matrix [R, C], zero outside the matrix. A thread gets ``WIDE`` columns."""
    places, inside = _places(x_stride, M, K, m, k, 0, R, C, WIDE)
    x = tl.load(x_ptr + places, mask=inside, other=0.0)
    if WIDE == 16:
        places, inside = _places(x_stride, M, K, m, k, 1, R, C, WIDE)
        second = tl.load(x_ptr + places, mask=inside, other=0.0)
        x = tl.reshape(tl.permute(tl.join(x, second), (0, 1, 3, 2)), (R, C))
    return x


@triton.jit
def store_part(out_ptr, halves, M, K: tl.constexpr, m, k, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    places, inside = _places(K, M, K, m, k, 0, R, C, WIDE)
    if WIDE == 16:
        halves, second = tl.split(tl.permute(tl.reshape(halves, (R, C // 16, 2, 8)), (0, 1, 3, 2)))
        tl.store(out_ptr + places, halves, mask=inside)
        places, inside = _places(K, M, K, m, k, 1, R, C, WIDE)
        tl.store(out_ptr + places, second, mask=inside)
    else:
        tl.store(out_ptr + places, halves, mask=inside)


@triton.jit
def halves_of(values, signed, GPU: tl.constexpr):
    """Return FP32 magnitudes that are exact in bf16 as int16 bits of bf16, with the signs of ``signed``.

    Their upper half is all of them. A NaN stays one.
    """
    if GPU and (signed.dtype == tl.float32):  # two numbers at once
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, s; prmt.b32 a, $1, $2, 0x7632; prmt.b32 s, $3, $4, 0x7632;"
            " lop3.b32 $0, a, s, 0x80008000, 0xF8; }",
            "=r,r,r,r,r", [values, signed], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    elif GPU:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; prmt.b32 a, $1, $2, 0x7632; lop3.b32 $0, a, $3, 0x80008000, 0xF8; }",
            "=r,r,r,r", [values, signed.to(tl.int16, bitcast=True)], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        sign = to_float32(signed).to(tl.int32, bitcast=True) & -0x80000000
        return ((values.to(tl.int32, bitcast=True) | sign) >> 16).to(tl.int16)


@triton.jit
def scaled(halves, factor, GPU: tl.constexpr):
    """Return products of bf16 numbers and FP32 factors that are exact in bf16, all as int16 bits of bf16."""
    if GPU:  # two numbers at once; the addend −0 changes no product
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
            "=r,r,r", [halves, factor.to(tl.bfloat16)], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        products = (halves.to(tl.int32) << 16).to(tl.float32, bitcast=True) * factor
        return (products.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def lifted(signed, lift, GPU: tl.constexpr):
    """Return FP32 magnitudes times a power of two, ``lift`` [1, 1]. A bf16 number may underflow."""
    if GPU and (signed.dtype == tl.bfloat16):  # two numbers at once; the addend −0 changes no product
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, z; mov.b32 z, 0x80008000; and.b32 a, $2, 0x7FFF7FFF; fma.rn.bf16x2 a, a, $3, z;"
            " shl.b32 $0, a, 16; and.b32 $1, a, 0xFFFF0000; }",
            "=r,=r,r,r", [signed, lift.to(tl.bfloat16)], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.abs(to_float32(signed)) * lift


@triton.jit
def lifted_tiles(signed, whole, ROWS: tl.constexpr, COLS: tl.constexpr, GPU: tl.constexpr):
    """Return magnitudes in tiles of ``ROWS`` × ``COLS``, in units in which the scale of the tensor is in [0.5, 1), and
    the bits of the amax of each tile.
    """
    lift = lift_of(whole)
    shape: tl.constexpr = (signed.shape[0] // ROWS, ROWS, signed.shape[1] // COLS, COLS)
    tiles = tl.reshape(lifted(signed, tl.reshape(lift, (1, 1)), GPU), shape)
    # The amax is what it was, unless it underflowed. The tile becomes zero then.
    amax = largest(tiles.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True) * inverse_power(lift)
    return tiles, amax.to(tl.int32, bitcast=True)
