# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""The keys of stochastic rounding by one kernel of one thread: see :mod:`numerics.quantize.device_keys`."""

import triton
import triton.language as tl

from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.rounding import splitmix64


@triton.jit
def _mixed(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _store(words_ptr, state, gemm_mixed):
    key = _mixed(_mixed(state ^ gemm_mixed))
    tl.store(words_ptr, key.to(tl.int32))
    tl.store(words_ptr + 1, (key >> 32).to(tl.int32))


@triton.jit(do_not_specialize=["place"])
def key_kernel(
    state_ptr, counts_ptr, identities_ptr, words_ptr, place, FIRST_MIXED: tl.constexpr, SECOND_MIXED: tl.constexpr
):
    """Write the key words of both GEMMs of the linear at ``place`` and increment its count.

    A linear has 4 numbers in the identities and 8 words.
    """
    count = tl.load(counts_ptr + place)
    tl.store(counts_ptr + place, count + 1)
    identity = identities_ptr + 4 * place
    microbatch = count * tl.load(identity + 1) + tl.load(identity + 2)
    state = tl.load(state_ptr).to(tl.uint64, bitcast=True)
    state = _mixed(state ^ _mixed(microbatch.to(tl.uint64, bitcast=True)))
    state = _mixed(state ^ tl.load(identity).to(tl.uint64, bitcast=True))
    _store(words_ptr + 8 * place, state, FIRST_MIXED)
    _store(words_ptr + 8 * place + 4, state, SECOND_MIXED)


def advance(state, counts, identities, words, place, gemms):
    """See :func:`snip_megatron.numerics.quantize.device_keys.advance`."""
    constants = {"FIRST_MIXED": splitmix64(gemms[0]), "SECOND_MIXED": splitmix64(gemms[1])}
    launch(key_kernel, (1, 1), (state, counts, identities, words), (), (place,), constants, {"num_warps": 1})
