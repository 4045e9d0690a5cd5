"""Rounding to small floating-point types, and the counter-based random numbers of stochastic rounding and probe noise.

Every random number is a function of (seed, global row, global column). There is no generator state, so activation
recompute, every sharding and the Triton kernels give the same numbers.

Each row has a 32-bit word and each pair of columns (2i, 2i + 1) an odd factor (:func:`row_keys`, :func:`column_keys`),
by the finaliser of MurmurHash3 (A. Appleby). For an element, the product row word · column factor has its 16-bit halves
swapped, is multiplied by a constant, and the factor is added: this is the draw of the odd column. One more
multiplication gives the draw of the even column. Seeds are derived with the finaliser of SplitMix64.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import Element

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
# Device code cannot read the constants of a module: kernels/device.py repeats these.
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35  # MurmurHash3's finaliser
MIX_LAST = 0x9E3779B1
# The points (h, MIX_EVEN·h) mod 2^32 fill the square evenly: the shortest vector (j, k) with j + k·MIX_EVEN = 0 has
# length 68,724, and no constant reaches more than 70,422.
MIX_EVEN = 0xADB4A92D
ROW_STEP, COLUMN_STEP = 0x9E3779B1, 0x85EBCA77
_NORMAL_STREAM = 0x6E6F726D
_NORMAL_BITS = 16

Key = int | Tensor
"""A 64-bit seed, or its two key words in an int32 tensor [2] on the device (``device_keys.py``): equal draws."""


def derive_seed(*parts: int) -> int:
    """Mix integers (seed, step, microbatch, linear, gemm, …) into one 64-bit seed in [0, 2^64).

    The result depends on the order and the number of the parts. Each part is taken modulo 2^64.
    """
    return derive_seeds(parts[:-1], parts[-1:])[0] if parts else 0


def derive_seeds(parts: Sequence[int], last: Sequence[int]) -> list[int]:
    """Return ``[derive_seed(*parts, each) for each in last]``. Mixes the common parts only once."""
    state = _state(len(parts) + 1, tuple(parts[:-1]))  # all linears of a microbatch have these in common
    if parts:
        state = splitmix64(state ^ _mixed(parts[-1]))
    return [splitmix64(state ^ _mixed(part)) for part in last]


@functools.lru_cache(maxsize=64)
def _state(state: int, parts: tuple[int, ...]) -> int:
    for part in parts:
        state = splitmix64(state ^ _mixed(part))
    return state


@functools.lru_cache(maxsize=1024)
def _mixed(part: int) -> int:
    return splitmix64(int(part) & MASK64)


def splitmix64(value: int) -> int:
    """SplitMix64's finaliser of one step from ``value``, in [0, 2^64)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix32(h: Tensor) -> Tensor:
    """Apply the 32-bit finaliser of MurmurHash3 to int64 tensors that hold unsigned 32-bit numbers."""
    h = ((h ^ (h >> 16)) * MIX_1) & MASK32
    h = ((h ^ (h >> 13)) * MIX_2) & MASK32
    return h ^ (h >> 16)


def key_words(seed: int) -> tuple[int, int]:
    """Return two unsigned 32-bit words of a 64-bit seed. Kernels take them as arguments."""
    mixed = splitmix64(seed & MASK64)
    return mixed & MASK32, mixed >> 32


def _word(seed: Key, index: int) -> int | Tensor:
    """Return one of the two key words as an unsigned number, or as a 0-dim int64 tensor for words on the device."""
    return seed[index].long() & MASK32 if isinstance(seed, Tensor) else key_words(seed)[index]


def row_keys(seed: Key, rows: Tensor) -> Tensor:
    """Return one int32 word for each global row id in [0, 2^32), integers [R]. Words of different rows differ."""
    return mix32((rows.long() * ROW_STEP + _word(seed, 0)) & MASK32).to(torch.int32)


def column_keys(seed: Key, cols: Tensor) -> Tensor:
    """Return one odd int32 word for each global column id, integers [C]. Columns 2i and 2i + 1 have the same word."""
    return (mix32(((cols.long() >> 1) * COLUMN_STEP + _word(seed, 1)) & MASK32) | 1).to(torch.int32)


def random_bits(seed: Key, rows: Tensor, cols: Tensor) -> Tensor:
    """Return 32 random bits for each element, int32 [len(rows), len(cols)], of which the upper are mixed better.

    ``seed`` is a 64-bit number, or key words on the device. ``rows`` and ``cols`` are 1-D integer tensors of global ids
    in [0, 2^32), which need not be contiguous: those of a SwiGLU shard are not.
    """
    words, factors = row_keys(seed, rows).unsqueeze(1), column_keys(seed, cols)
    even = (cols % 2 == 0).to(words.device)
    last = torch.where(even, _signed(MIX_EVEN), 1).to(torch.int32)
    bits = words * factors  # int32 arithmetic wraps, as the hash modulo 2^32 requires
    # The upper half of a word is well mixed. In the lower position it reaches every bit of the next product.
    upper = (bits >> 16).bitwise_and_(0xFFFF)  # the mask makes the shift a logical one
    bits <<= 16
    bits |= upper
    return bits.mul_(_signed(MIX_LAST)).add_(factors).mul_(last)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def random_normal(seed: int, rows: Tensor, cols: Tensor) -> Tensor:
    """Return standard normal numbers, float32 [len(rows), len(cols)]. Arguments are those of :func:`random_bits`.

    They are 2^16 equally likely quantiles, scaled to unit variance; the largest magnitude is 4.33. A table look-up
    gives the same bits on every shard. Vectorised logarithms and cosines do not.
    """
    bits = random_bits(seed ^ _NORMAL_STREAM, rows, cols)
    index = (bits >> (32 - _NORMAL_BITS)).add_(1 << (_NORMAL_BITS - 1))
    return _normal_table().to(bits.device).index_select(0, index.view(-1)).view(bits.shape)


@functools.cache
def _normal_table() -> Tensor:
    count = 1 << _NORMAL_BITS
    quantiles: Tensor = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    return (quantiles / quantiles.square().mean().sqrt()).to(torch.float32)


def round_to_element(y: Tensor, element: Element, bits: Tensor | None = None) -> Tensor:
    """Saturate FP32 ``y`` and round it to the numbers of ``element``, in place. NaN stays NaN.

    Without ``bits``, it is rounded to nearest, ties to even, and zero keeps its sign. With ``bits``, int32 draws of
    :func:`random_bits` in the shape of ``y``, it is rounded up in magnitude with probability
    (|y| − lower)/(upper − lower), in steps of 2^-(23 − mantissa_bits). The draw does not depend on the sign.
    """
    y.clamp_(-element.maximum, element.maximum)
    step = spacing(y, element)
    if bits is None:
        return y.div_(step).round_().mul_(step)  # division by a power of two is exact
    # floor(steps + u): u in [0, 1) are the upper ``resolution`` bits of the draw, so that the FP32 sum is exact.
    resolution = 23 - element.mantissa_bits
    draw = (bits >> (32 - resolution)).bitwise_and_((1 << resolution) - 1)
    steps = y.abs().div_(step).mul_(2.0**resolution).floor_().add_(draw).mul_(2.0**-resolution).floor_()
    return torch.copysign(steps.mul_(step), y, out=y)


def spacing(y: Tensor, element: Element) -> Tensor:
    """Return the distance between neighbours in ``element`` at each FP32 y, a power of two."""
    exponent = y.view(torch.int32) & 0x7F800000
    exponent.clamp_(min=(127 + element.min_exponent) << 23).sub_(element.mantissa_bits << 23)
    return exponent.view(torch.float32)
