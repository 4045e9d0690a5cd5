"""Rounding to small floats, and the counter-based random numbers behind stochastic rounding and probe noise.

Every random number is a pure function of (seed, global row, global column): no state, so recompute, resharding and the
Triton kernels agree. The hash is made of unsigned 32-bit arithmetic only. A row has one word and a pair of columns
(2i, 2i + 1) an odd factor (:func:`row_keys`, :func:`column_keys`), made once by the finaliser of MurmurHash3 (A.
Appleby). Where they meet, row · factor, its halves exchanged, is multiplied once more and the factor added: the draw of
the odd column; a last multiplication makes the even column's of it. Seeds are derived with SplitMix64's finaliser.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from snip_megatron.quantization.formats import Element

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# Written out again in triton_stochastic.py, whose device code can read no module.
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35  # MurmurHash3's finaliser
MIX_LAST, MIX_EVEN = 0x9E3779B1, 0xADB4A92D  # (h, MIX_EVEN·h) mod 2^32 fill the square evenly: the shortest vector
# (j, k) with j + k·MIX_EVEN = 0 has length 68,724, and none can have more than 70,422
ROW_STEP, COLUMN_STEP = 0x9E3779B1, 0x85EBCA77
_SIGN_STREAM, _NORMAL_STREAM = 0x7369676E, 0x6E6F726D
_NORMAL_BITS = 16
_SLAB = 1 << 17  # elements


def derive_seed(*parts: int) -> int:
    """Mix integers (seed, step, microbatch, linear, gemm, …) into one 64-bit seed in [0, 2^64).

    Order and number of the parts matter; each is taken modulo 2^64.
    """
    return derive_seeds(parts[:-1], parts[-1:])[0] if parts else 0


def derive_seeds(parts: Sequence[int], last: Sequence[int]) -> list[int]:
    """``[derive_seed(*parts, each) for each in last]``, the common parts mixed once: the host pays for every launch."""
    state = len(parts) + 1
    for part in parts:
        state = _splitmix64(state ^ _splitmix64(int(part) & _MASK64))
    return [_splitmix64(state ^ _splitmix64(int(part) & _MASK64)) for part in last]


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _mix32(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors that hold unsigned 32-bit numbers."""
    h = ((h ^ (h >> 16)) * MIX_1) & _MASK32
    h = ((h ^ (h >> 13)) * MIX_2) & _MASK32
    return h ^ (h >> 16)


def key_words(seed: int) -> tuple[int, int]:
    """Two unsigned 32-bit words of a 64-bit seed: what a kernel is launched with."""
    mixed = _splitmix64(seed & _MASK64)
    return mixed & _MASK32, mixed >> 32


def row_keys(seed: int, rows: Tensor) -> Tensor:
    """One int32 word for each global row id, no two alike: ``rows`` integer [R], ids in [0, 2^32)."""
    return _mix32((rows.long() * ROW_STEP + key_words(seed)[0]) & _MASK32).to(torch.int32)


def column_keys(seed: int, cols: Tensor) -> Tensor:
    """One odd int32 word for each global column id, the same for 2i and 2i + 1: ``cols`` integer [C] as above."""
    return (_mix32(((cols.long() >> 1) * COLUMN_STEP + key_words(seed)[1]) & _MASK32) | 1).to(torch.int32)


def random_bits(seed: int, rows: Tensor, cols: Tensor) -> Tensor:
    """int32 [len(rows), len(cols)] of 32 random bits; the upper ones are the better mixed.

    Args:
        seed: 64-bit, taken modulo 2^64.
        rows, cols: 1-D integer tensors of global ids in [0, 2^32); they need not be contiguous (a SwiGLU shard is not).
    """
    words, factors = row_keys(seed, rows).unsqueeze(1), column_keys(seed, cols)
    even = (cols % 2 == 0).to(words.device)
    last = torch.where(even, _signed(MIX_EVEN), 1).to(torch.int32)
    bits = torch.empty(len(rows), len(cols), dtype=torch.int32, device=words.device)
    for h, word in zip(_slabs(bits), _slabs(words, like=bits), strict=True):
        torch.mul(word, factors, out=h)  # int32 arithmetic wraps: the hash is defined modulo 2^32
        _swap(h).mul_(_signed(MIX_LAST)).add_(factors).mul_(last)
    return bits


def _swap(h: Tensor) -> Tensor:
    """Exchange the halves of int32 words, in place: the upper ones are well mixed and reach every bit of a product."""
    upper = (h >> 16).bitwise_and_(0xFFFF)  # the mask makes the shift a logical one
    h <<= 16
    h |= upper
    return h


def _slabs(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Views of ``x`` along dim 0, small on a CPU: temporaries stay in cache, no fresh pages are faulted in."""
    like = x if like is None else like
    if like.device.type != "cpu" or like.numel() <= _SLAB:
        return (x,)
    slabs: tuple[Tensor, ...] = torch.split(x, max(1, _SLAB * like.shape[0] // like.numel()))
    return slabs


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def random_signs(seed: int, rows: Tensor, cols: Tensor) -> Tensor:
    """float32 [len(rows), len(cols)] of ±1 with equal probability; arguments as :func:`random_bits`."""
    bits = random_bits(seed ^ _SIGN_STREAM, rows, cols)
    return (bits >> 31).mul_(2).add_(1).to(torch.float32)


def random_normal(seed: int, rows: Tensor, cols: Tensor) -> Tensor:
    """float32 [len(rows), len(cols)], standard normal; arguments as :func:`random_bits`.

    Drawn from 2^16 equally likely quantiles scaled to unit variance (largest |z| 4.33): a table look-up is bitwise
    the same for every shard, which vectorised logarithms and cosines are not.
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
    """Saturate and round FP32 ``y`` to the numbers of ``element``, in place; returns ``y``.

    Nearest, ties to even, without ``bits``. With ``bits`` (int32 of :func:`random_bits`, shape of y) stochastic: up
    in magnitude with probability (|y| − lower)/(upper − lower), in steps of 2^-(23 − mantissa_bits); the draw does not
    depend on the sign. NaN stays NaN; nearest keeps the sign of zero.
    """
    if bits is None:
        for part in _slabs(y):
            part.clamp_(-element.maximum, element.maximum)
            step = _spacing(part, element)
            part.div_(step).round_().mul_(step)  # division by a power of two is exact
        return y
    for part, draw in zip(_slabs(y), _slabs(bits, like=y), strict=True):
        part.clamp_(-element.maximum, element.maximum)
        step = _spacing(part, element)
        magnitude = part.abs().div_(step)
        _round_up(magnitude, draw, 23 - element.mantissa_bits).mul_(step)
        torch.copysign(magnitude, part, out=part)
    return y


def _spacing(y: Tensor, element: Element) -> Tensor:
    """The distance between neighbours in ``element`` at each y, a power of two: from the exponent bits of FP32."""
    exponent = y.view(torch.int32) & 0x7F800000
    exponent.clamp_(min=(127 + element.min_exponent) << 23).sub_(element.mantissa_bits << 23)
    return exponent.view(torch.float32)


def _round_up(steps: Tensor, bits: Tensor, resolution: int) -> Tensor:
    """floor(steps + u) in place; u in [0, 1): the upper bits, multiples of 2^-resolution, with which FP32 is exact."""
    draw = (bits >> (32 - resolution)).bitwise_and_((1 << resolution) - 1)
    return steps.mul_(2.0**resolution).floor_().add_(draw).mul_(2.0**-resolution).floor_()
