"""nvfp4_eden: its bits by an independent implementation, its means over keys, and its independence of layouts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from snip_megatron.errors import SnipError
from snip_megatron.gemm import reference
from snip_megatron.quantization import fake_quantize, quantize
from snip_megatron.quantization.eden import draws
from snip_megatron.quantization.hadamard import Rotation, points, rotate, turned

EDEN = "nvfp4_eden"
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # 0 … 448, in order
MASK = 0xFFFFFFFF


def matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).exp()


def quantised(x: torch.Tensor, key: int, fmt: str = EDEN) -> torch.Tensor:
    """Q of the transform of x [rows, cols] along the columns."""
    operand, options = turned(x, fmt, 1, Rotation(key), None)
    return fake_quantize(operand, fmt, axis=1, **options)


def keys(count: int) -> list[int]:
    return [(k * 2654435761 + 12345) % 2**31 for k in range(count)]


# -- bits ----------------------------------------------------------------------------------------------------------
def mix(h: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = ((h ^ (h >> shift)) * factor) & MASK
    return h


def fold(number: int) -> int:
    return (number ^ number >> 32) & MASK


def oracle(z: np.ndarray, key: int) -> np.ndarray:
    """Quantise one row z [128·n], transformed already. Sums are Python's integers, grids are searched."""
    one = np.float32
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    clipped = one(6 / (17 / 16 * 0.93))
    whole = one(np.abs(z).max()) / one(float(6 / (17 / 16 * 0.93)) * 256)
    out = np.zeros_like(z)
    for start in range(0, len(z), 128):
        group, square, product = [], 0, 0
        for i in range(start, start + 128, 16):
            tile = z[i : i + 16]
            stored = float((np.abs(tile).max() / clipped / whole).astype(ml_dtypes.float8_e4m3fn))
            y = tile / (one(stored) * whole) if stored else np.zeros_like(tile)
            nearest = np.abs(np.abs(y)[:, None] - grid).argmin(1)  # no number here lies between two
            values = np.copysign(grid[nearest], y).astype(one)
            units = int(stored * 512) ** 2
            square += units * sum(int(a * a * one(4096)) for a in y)
            product += units * sum(int(a * b * one(4096)) for a, b in zip(y, values, strict=True))
            group.append((i, stored, values))
        factor = one(square) / one(product) if product else one(1)
        common = mix((fold(product) + mix((fold(square) + (key ^ 0x3C6EF372)) & MASK)) & MASK)
        for place, (i, stored, values) in enumerate(group):
            scale = float(min(one(stored) * factor, one(448)))
            below = E4M3[np.searchsorted(E4M3, scale, side="right") - 1]
            above = E4M3[min(np.searchsorted(E4M3, scale, side="right"), 126)]
            share = 0.0 if above == below else np.floor((scale - below) / (above - below) * 2**20)
            drawn = mix((place * 0x9E3779B1 + common) & MASK) >> 12
            out[i : i + 16] = values * (one(above if drawn >= 2**20 - share else below) * whole)
    return out


@pytest.mark.parametrize("key", [0, 77, 2**31 - 1])
def test_bits_are_those_of_the_definition(key: int) -> None:
    """Each row is a matrix of its own here, whose largest number decides its scale."""
    for row in matrix(6, 512, key % 1000).split(1):
        z = rotate(row, key, 128, 1)
        np.testing.assert_array_equal(quantised(row, key).numpy()[0], oracle(z.numpy()[0], key))


@pytest.mark.parametrize("axis", [0, 1])
def test_the_transform_is_hadamards_matrix_with_signs_of_the_key(axis: int) -> None:
    x = matrix(200, 300, 3)
    signs = np.array([1 - 2 * (mix((p * 0x9E3779B1 + (99 ^ 0x5F356495)) & MASK) >> 31) for p in range(128)])
    assert 40 < (signs > 0).sum() < 88
    turned_by = hadamard(128) / 128**0.5 * signs
    along = x.numpy() if axis else x.numpy().T
    padded = np.pad(along, ((0, 0), (0, -along.shape[1] % 128))).reshape(len(along), -1, 128)
    expected = (padded @ turned_by.T).reshape(len(along), -1)
    found = rotate(x, 99, 128, axis)
    np.testing.assert_allclose(found if axis else found.t(), expected, atol=1e-4)
    assert torch.equal(rotate(x, torch.tensor([99], dtype=torch.int32), 128, axis), found)


def test_both_axes_quantise_alike() -> None:
    x = matrix(256, 128)
    along, down = (quantize(x if a else x.t(), EDEN, axis=a, rounding="stochastic", seed=4) for a in (1, 0))
    assert torch.equal(along.dequantize(), down.dequantize().t())
    assert torch.equal(along.scale, down.scale.t())
    on_device = torch.tensor([4], dtype=torch.int32)
    assert torch.equal(fake_quantize(x, EDEN, rounding="stochastic", seed=on_device), along.dequantize())


def test_scales_are_numbers_of_e4m3() -> None:
    for seed, rounding in ((1, "stochastic"), (None, "nearest")):
        q = quantize(matrix(64, 256), EDEN, rounding=rounding, seed=seed)
        assert q.factors is not None
        assert np.isin(q.factors[0].double().numpy(), E4M3).all()


# -- means ---------------------------------------------------------------------------------------------------------
def test_a_groups_rounded_vector_projects_onto_it_exactly() -> None:
    """⟨z, Q(z)⟩ = ⟨z, z⟩ before scales are rounded. Rounding to nearest alone makes vectors shorter."""
    z = matrix(64, 512).pow(3)
    mean = fake_quantize(z, EDEN, rounding="mean").double() * z.double()
    square = z.double().square().view(64, 4, 128).sum(2)
    known = square > 1e-6 * square.max()  # of smaller groups the E4M3 scales are zero or have few bits
    ratio = (mean.view(64, 4, 128).sum(2) / square)[known]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-3)


def test_products_are_unbiased_over_keys() -> None:
    """The mean over keys of Q(x)·Q(y) and Q(x)·y is x·y within its standard error; nearest rounding repeats its."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, 300, generator=generator)
    y = 0.3 * x + torch.randn(24, 300, generator=generator)
    exact = (x.double() * y).sum(1)
    both, one = [], []
    for key in keys(400):
        qx, qy = quantised(x, key), quantised(y, key)
        both.append((qx.double() * qy).sum(1))
        one.append((qx.double() * rotate(y, key, 128, 1)).sum(1))
    for products in (torch.stack(both), torch.stack(one)):
        deviation = (products.mean(0) - exact) / (products.std(0) / len(products) ** 0.5)
        assert float(deviation.abs().max()) < 4.5
        assert float(deviation.square().mean()) < 2.0  # 24 squares of standard normals: 1 ± 0.29
    nearest = (fake_quantize(x, "nvfp4_nearest").double() * fake_quantize(y, "nvfp4_nearest")).sum(1) - exact
    of_mean = torch.stack(both).mean(0) - exact
    assert float(nearest.norm()) > 8 * float(of_mean.norm())


def test_of_a_vector_with_itself_the_error_stays() -> None:
    """Both operands have one rotation, so that errors of parallel vectors are equal: the limit of the method."""
    x = matrix(16, 256)
    products = torch.stack([quantised(x, key).double().square().sum(1) for key in keys(60)]).mean(0)
    excess = products / x.double().square().sum(1) - 1.0
    assert (excess > 0.005).all()
    assert (excess < 0.02).all()


def test_beside_a_number_that_dominates_its_group_the_rest_is_lost() -> None:
    """All transformed numbers are nearly ±a then, and round to the same number: the other limit."""
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(2)) * 0.01
    x[:, 5] = 10.0
    y = x.clone()
    y[:, 5] = 0.0
    kept = torch.stack([(quantised(x, key) * rotate(y, key, 128, 1)).double().sum(1) for key in keys(60)]).mean(0)
    assert (kept < 0.2 * y.double().square().sum(1)).all()


def test_errors_are_half_of_those_of_stochastic_rounding() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    total = float(x.double().square().sum())
    own = float((quantised(x, 7) - rotate(x, 7, 128, 1)).double().square().sum()) / total
    drawn = float((fake_quantize(x, "nvfp4", rounding="stochastic", seed=1) - x).double().square().sum()) / total
    nearest = float((fake_quantize(rotate(x, 7, 128, 1), "nvfp4") - rotate(x, 7, 128, 1)).square().sum()) / total
    assert nearest < own < 1.15 * nearest
    assert own < 0.55 * drawn
    assert -10 * np.log10(own) > 19.5  # dB


def test_draws_are_uniform_and_differ_in_tiles_keys_and_contents() -> None:
    content = torch.arange(1, 4097).mul(2**34).view(-1, 1, 1, 1).expand(-1, 1, 16, 1)
    bits = draws(5, (content, content // 3), 1)[:, 0, :8, 0]
    others = [draws(6, (content, content // 3), 1)[:, 0, :8, 0], bits.roll(1, 0), bits.roll(1, 1)]
    for each in (bits, *others):
        share = (each.double() / 2**32 + 0.5).flatten()
        assert abs(float(share.mean()) - 0.5) < 4.5 * (1 / 12 / share.numel()) ** 0.5
        counts = torch.histc(share.float(), 64, 0, 1)
        assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 63 + 4.5 * (2 * 63) ** 0.5
    for other in others:
        pair = torch.stack([bits.double().flatten(), other.double().flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4.5 / bits.numel() ** 0.5


# -- what is not finite, tails, layouts ----------------------------------------------------------------------------
def test_zeros_stay_and_a_nan_spoils_its_group() -> None:
    x = matrix(4, 300)
    x[1] = 0.0
    x[2, 200] = float("nan")
    found = quantised(x, 3)
    assert found.shape == (4, 384)
    assert not found[1].any()
    assert found[2, 128:256].isnan().all()
    assert found.isnan().sum() == 128
    assert not quantised(torch.zeros(4, 32), 3).any()


@pytest.mark.parametrize(("rows", "cols"), [(0, 5), (5, 0), (1, 1), (3, 17)])
def test_small_shapes(rows: int, cols: int) -> None:
    x = matrix(rows, cols)
    for axis in (0, 1):
        operand, options = turned(x, EDEN, axis, None, None)
        q = quantize(operand, EDEN, axis=axis, **options)
        assert q.values.shape == operand.shape
        assert q.scale.shape == (-(-operand.shape[0] // q.tile[0]), -(-operand.shape[1] // q.tile[1]))


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_of_whole_groups_have_the_numbers_of_the_whole(axis: int) -> None:
    """Draws read no index: a shard along either dimension finds them, given the amax of all."""
    x = matrix(256, 384)
    whole, options = turned(x, EDEN, axis, Rotation(9), None)
    expected = fake_quantize(whole, EDEN, axis=axis, **options)
    amax = rotate(x, 9, 128, axis).abs().amax()
    for dim, size in ((0, 128), (1, 128), (1 - axis, 48)):
        shards = []
        for shard in x.split(size, dim):
            operand, own = turned(shard, EDEN, axis, Rotation(9, amax), None)
            shards.append(fake_quantize(operand, EDEN, axis=axis, **own))
        assert torch.equal(torch.cat(shards, dim), expected)


# -- products ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", [0, 8])
def test_gemms_with_tails(key: int) -> None:
    """N and T are no multiples of 128; the same key for both operands, and another product with two."""
    g, w, x = matrix(70, 200, 1), matrix(200, 48, 2), matrix(70, 48, 3)
    rotation = (Rotation(key), Rotation(key))
    for found, exact in (
        (reference.dgrad(g, w, EDEN, rotation=rotation), g @ w),
        (reference.wgrad(g, x, EDEN, rotation=rotation), g.t() @ x),
    ):
        assert float((found - exact).norm()) < 0.2 * float(exact.norm())
    other = reference.dgrad(g, w, EDEN, rotation=(Rotation(key), Rotation(key + 1)))
    assert float((other - g @ w).norm()) > 0.5 * float((g @ w).norm())


def test_every_operand_is_transformed_and_weights_by_no_other_transform() -> None:
    assert [points(EDEN, axis, weight=weight) for axis in (0, 1) for weight in (False, True)] == [128] * 4
    assert [points("nvfp4_hadamard", axis, weight=weight) for axis, weight in ((0, False), (0, True), (1, False))] == [
        16,
        0,
        0,
    ]


def test_rounding_is_checked() -> None:
    with pytest.raises(SnipError, match="needs a seed"):
        fake_quantize(matrix(2, 128), EDEN, rounding="stochastic")
    with pytest.raises(SnipError, match="rounding 'mean' is not one of nearest, stochastic"):
        fake_quantize(matrix(2, 128), "nvfp4", rounding="mean")
    with pytest.raises(SnipError, match="is not one of nearest, stochastic, mean"):
        fake_quantize(matrix(2, 128), EDEN, rounding="up")
