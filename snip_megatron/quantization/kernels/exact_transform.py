# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of the Hadamard transforms of 16 and 128 rows, with the signs of ``hadamard.py``."""

import triton
import triton.language as tl

from snip_megatron.quantization.hadamard import SIGN_STREAM
from snip_megatron.quantization.kernels.elements import to_float32
from snip_megatron.quantization.kernels.stochastic import mix32

_SIGN_STREAM = tl.constexpr(SIGN_STREAM)


@triton.jit
def _sums(x, APART: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Replace each pair (a, b) of rows ``APART`` apart by (a + b, a − b)."""
    pairs = tl.permute(tl.reshape(x, (R // (2 * APART), 2, APART, C)), (0, 2, 3, 1))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
    return tl.reshape(pairs, (R, C))


@triton.jit
def signs_of(signs_ptr, signs, LOADED: tl.constexpr):
    return tl.load(signs_ptr) if LOADED else signs


@triton.jit
def _flips(signs, POINTS: tl.constexpr):
    """Return 1 for the numbers of a group that change their sign, otherwise 0."""
    places = tl.arange(0, POINTS)
    if POINTS == 16:
        return (signs >> places) & 1
    else:
        return (mix32(places.to(tl.uint32) * 0x9E3779B1 + (signs.to(tl.uint32) ^ _SIGN_STREAM)) >> 31).to(tl.int32)


@triton.jit
def flipped(x, signs, GPU: tl.constexpr):
    """Return x [128, …], of any dtype, with the signs of a group of 128."""
    flips = _flips(signs, 128)[:, None]
    if GPU and (x.dtype != tl.float32):  # two numbers at once
        bits = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [x.to(tl.int16, bitcast=True), (flips << 15).to(tl.int16)],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(x.dtype, bitcast=True)
    else:
        return to_float32(x) * (1 - 2 * flips).to(tl.float32)


@triton.jit
def transformed(x, signs, POINTS: tl.constexpr, GPU: tl.constexpr):
    """Return the Hadamard transform of groups of 16 rows, or of 128 rows if x has as many, in FP32.

    The order of sums is that of ``hadamard.py``.
    """
    if POINTS == 128:
        x = to_float32(flipped(x, signs, GPU))
    else:
        factors = (1 - 2 * _flips(signs, 16)).to(tl.float32)
        groups: tl.constexpr = (x.shape[0] // 16, 16, x.shape[1])
        x = tl.reshape(tl.reshape(to_float32(x), groups) * factors[None, :, None], x.shape)
    for i in tl.static_range(4 if POINTS == 16 else 7):
        x = _sums(x, (POINTS // 2) >> i, x.shape[0], x.shape[1])
    return x * (0.25 if POINTS == 16 else 0.08838834764831845)  # 1/√16, 1/√128
