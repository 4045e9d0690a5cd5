# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of the Hadamard transform of 16 rows, with the signs of ``hadamard.py``."""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.elements import to_float32


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
def transformed(x, signs):
    """Return the transform of groups of 16 rows in FP32. The order of sums is that of ``hadamard.py``."""
    factors = (1 - 2 * ((signs >> tl.arange(0, 16)) & 1)).to(tl.float32)
    groups: tl.constexpr = (x.shape[0] // 16, 16, x.shape[1])
    x = tl.reshape(tl.reshape(to_float32(x), groups) * factors[None, :, None], x.shape)
    for i in tl.static_range(4):
        x = _sums(x, 8 >> i, x.shape[0], x.shape[1])
    return x * 0.25
