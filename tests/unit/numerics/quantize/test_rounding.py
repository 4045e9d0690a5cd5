"""Element rounding against ml_dtypes, bit for bit; the hash against numpy; the statistics of random draws."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.numerics.quantize import derive_seed, derive_seeds, random_normal
from snip_megatron.numerics.quantize.formats import E2M1, E4M3, Element
from snip_megatron.numerics.quantize.rounding import random_bits, round_to_element

ELEMENTS = {"e2m1": (E2M1, ml_dtypes.float4_e2m1fn), "e4m3": (E4M3, ml_dtypes.float8_e4m3fn)}
IDS = torch.arange(1024)


def grid(element: Element, dtype: type) -> np.ndarray:
    """All finite non-negative numbers of the format, ascending, from ml_dtypes' own decoding."""
    codes = np.arange(2 ** (8 if element is E4M3 else 4) // 2, dtype=np.uint8)
    numbers = codes.view(dtype).astype(np.float32) if element is E4M3 else codes.astype(np.uint8).view(dtype)
    numbers = np.asarray(numbers, dtype=np.float32)
    return np.unique(numbers[np.isfinite(numbers)])


def expected(values: np.ndarray, element: Element, dtype: type) -> np.ndarray:
    return np.clip(values, -element.maximum, element.maximum).astype(dtype).astype(np.float32)


@pytest.mark.parametrize("name", ELEMENTS)
def test_grid_midpoints_and_their_neighbours_agree_with_ml_dtypes(name: str) -> None:
    element, dtype = ELEMENTS[name]
    numbers = grid(element, dtype)
    ties = (numbers[1:] + numbers[:-1]) / 2
    points = np.concatenate([numbers, ties, [element.maximum * 1.5, 1e-45, 1e-38, 3.4e38, np.inf, 0.0]])
    points = points.astype(np.float32)
    values = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))])
    values = np.concatenate([values, -values]).astype(np.float32)
    assert len(numbers) == (8 if element is E2M1 else 127)
    ours = round_to_element(torch.from_numpy(values.copy()), element).numpy()
    np.testing.assert_array_equal(ours.view(np.uint32), expected(values, element, dtype).view(np.uint32))


def hash_oracle(seed: int, row: int, col: int) -> int:
    """The documented hash in plain Python integers, one element."""
    mask = 0xFFFFFFFF

    def mix(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
        return h ^ (h >> 16)

    def splitmix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    words = splitmix(seed)
    row_word = mix((row * 0x9E3779B1 + words) & mask)
    factor = mix(((col >> 1) * 0x85EBCA77 + (words >> 32)) & mask) | 1
    h = (row_word * factor) & mask
    h = ((h << 16 | h >> 16) * 0x9E3779B1 + factor) & mask
    return h if col & 1 else (h * 0xADB4A92D) & mask


@given(
    seed=st.integers(0, 2**64 - 1),
    rows=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
    cols=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
)
def test_random_bits_are_the_documented_hash(seed: int, rows: list[int], cols: list[int]) -> None:
    bits = random_bits(seed, torch.tensor(rows), torch.tensor(cols))
    assert bits.dtype == torch.int32
    assert [[b % 2**32 for b in line] for line in bits.tolist()] == [
        [hash_oracle(seed, r, c) for c in cols] for r in rows
    ]


def uniforms(seed: int, rows: torch.Tensor = IDS, cols: torch.Tensor = IDS) -> torch.Tensor:
    return random_bits(seed, rows, cols).double() / 2**32


SEEDS = (12345, 2**63 + 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_draws_are_uniform_and_neighbours_uncorrelated(seed: int) -> None:
    u = uniforms(seed)
    n = u.numel()
    limit = 4 / n**0.5  # four standard errors of a correlation
    assert abs(u.mean().item()) < limit / 12**0.5
    counts = torch.histc(u, 256, -0.5, 0.5)
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi_square - 255) < 4 * (2 * 255) ** 0.5
    neighbours = {
        "next row": uniforms(seed, IDS + 1),
        "next column": uniforms(seed, IDS, IDS + 1),
        "next pair": uniforms(seed, IDS, IDS + 2),
        "next tile": uniforms(seed, IDS + 128, IDS + 128),
        "next seed": uniforms(seed + 1),
        "seed's upper word": uniforms(seed ^ 2**32),
        "transposed": uniforms(seed).t(),
    }
    for name, other in neighbours.items():
        mask = torch.ones_like(u, dtype=torch.bool)
        if name == "transposed":
            mask = ~torch.eye(u.shape[0], dtype=torch.bool)
        assert abs(torch.corrcoef(torch.stack([u[mask], other[mask]]))[0, 1].item()) < limit, name


@given(parts=st.lists(st.integers(-(2**70), 2**70), max_size=5), at=st.integers(0, 4))
def test_derive_seed_depends_on_every_part(parts: list[int], at: int) -> None:
    seed = derive_seed(*parts)
    assert 0 <= seed < 2**64
    assert seed == derive_seed(*parts)
    assert derive_seed(*parts, 0) != seed
    if at < len(parts):
        changed = [*parts[:at], parts[at] + 1, *parts[at + 1 :]]
        assert derive_seed(*changed) != seed


@given(st.lists(st.integers(0, 2**64), max_size=5), st.lists(st.integers(0, 2**32), max_size=3))
def test_seeds_with_a_common_start_are_those_made_one_by_one(parts: list[int], last: list[int]) -> None:
    assert derive_seeds(parts, last) == [derive_seed(*parts, each) for each in last]


def test_derive_seed_is_what_checkpoints_and_replays_have_drawn_with() -> None:
    assert derive_seed() == 0
    assert [derive_seed(1), derive_seed(1, 2), derive_seed(1234, 7, 3, 12, 2)] == [
        16860738450190168606,
        16102348862467931958,
        4670749645677676337,
    ]


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_is_unbiased_and_hits_only_neighbours(name: str) -> None:
    element, dtype = ELEMENTS[name]
    numbers = grid(element, dtype)
    rng = np.random.default_rng(1)
    points = np.concatenate([[0.01, 0.3, 1.3, 2.9], rng.uniform(0, element.maximum, 12)]).astype(np.float32)
    bits = random_bits(5, torch.arange(len(points)), torch.arange(1 << 17))
    for sign in (1, -1):
        values = torch.from_numpy(sign * points)[:, None].expand(-1, bits.shape[1]).contiguous()
        rounded = round_to_element(values.clone(), element, bits)
        error = (rounded.double() - values.double()).mean(1)
        upper = numbers[np.searchsorted(numbers, points)]
        lower = numbers[np.searchsorted(numbers, points) - 1]
        probability = (points.astype(np.float64) - lower) / (upper - lower)
        standard = (upper - lower) * np.sqrt(probability * (1 - probability) / bits.shape[1])
        assert (error.abs().numpy() <= 4 * standard + 1e-6 * upper).all()
        for line, low, high in zip(rounded.abs().numpy(), lower, upper, strict=True):
            assert set(np.unique(line)) == {low, high}


def test_stochastic_rounding_keeps_representable_numbers_and_does_not_depend_on_the_sign() -> None:
    for element, dtype in ELEMENTS.values():
        numbers = torch.from_numpy(grid(element, dtype))[:, None].expand(-1, 4096).contiguous()
        bits = random_bits(3, torch.arange(numbers.shape[0]), torch.arange(4096))
        assert torch.equal(round_to_element(numbers.clone(), element, bits), numbers)
        values = torch.randn(numbers.shape, generator=torch.Generator().manual_seed(0)) * element.maximum / 3
        positive = round_to_element(values.clone(), element, bits)
        assert torch.equal(round_to_element(-values, element, bits), -positive)


def test_normals_have_their_moments_and_do_not_depend_on_the_layout() -> None:
    normal = random_normal(11, IDS, IDS)
    n = normal.numel()
    assert normal.dtype == torch.float32
    z = normal.double()
    for moment, value, spread in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((z**moment).mean().item() - value) < 4 * (spread / n) ** 0.5 + (0.01 if moment == 4 else 0), moment
    rows, cols = torch.tensor([3, 700, 8]), torch.tensor([1000, 2])
    assert torch.equal(random_normal(11, rows, cols), normal[rows][:, cols])
