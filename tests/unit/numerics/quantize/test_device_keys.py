"""Keys made on the device have the bits of the host's, in plain torch; the kernel: ``kernels/test_quantize.py``."""

import pytest
import torch

from snip_megatron.numerics.quantize import derive_seeds, fake_quantize
from snip_megatron.numerics.quantize.device_keys import DeviceKeys, LinearIdentity
from snip_megatron.numerics.quantize.rounding import key_words, random_bits

LINEARS = [LinearIdentity(0, 1, 0), LinearIdentity(87, 8, 3), LinearIdentity(2**48 + 12345, 2, 1)]
GEMMS = (1, 2)
CPU = torch.device("cpu")
SEEDS = [(0, 0), (1234, 999_999), (2**64 - 1, 7), (-5, 2**40)]


def host_words(seed: int, step: int, microbatch: int, linear: LinearIdentity) -> list[tuple[int, int]]:
    parts = (seed, step, microbatch * linear.factor + linear.offset, linear.number)
    return [key_words(key) for key in derive_seeds(parts, GEMMS)]


def unsigned(words: torch.Tensor) -> tuple[int, int]:
    first, second = (word & 0xFFFFFFFF for word in words.tolist())
    return first, second


@pytest.mark.parametrize(("seed", "step"), SEEDS)
def test_words_are_those_of_the_host(seed: int, step: int) -> None:
    keys = DeviceKeys(LINEARS, GEMMS, CPU)
    keys.start_step(seed, step)
    for microbatch in range(3):
        for place, linear in enumerate(LINEARS):
            result = [unsigned(words) for words in keys.next(place)]
            assert result == host_words(seed, step, microbatch, linear)


def test_a_step_begins_with_its_first_microbatch_whatever_ran_before() -> None:
    keys = DeviceKeys(LINEARS, GEMMS, CPU)
    keys.start_step(1, 1)
    for _ in range(5):  # such as the passes of a capture
        keys.next(1)
    keys.start_step(1, 2)
    assert [unsigned(words) for words in keys.next(1)] == host_words(1, 2, 0, LINEARS[1])


def test_draws_are_equal_for_a_seed_and_its_words() -> None:
    keys = DeviceKeys(LINEARS, GEMMS, CPU)
    keys.start_step(77, 5)
    words = keys.next(1)
    seeds = derive_seeds((77, 5, LINEARS[1].offset, LINEARS[1].number), GEMMS)
    rows, cols = torch.arange(40) + 2**31, torch.tensor([3, 4, 9, 100_000])
    x = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    for seed, key in zip(seeds, words, strict=True):
        assert torch.equal(random_bits(seed, rows, cols), random_bits(key, rows, cols))
        expected = fake_quantize(x, "fp4", rounding="stochastic", seed=seed)
        assert torch.equal(fake_quantize(x, "fp4", rounding="stochastic", seed=key), expected)
