"""Variants of nvfp4 and mxfp4, against independent quantisers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from snip_megatron.numerics.products.backend import REFERENCE
from snip_megatron.numerics.quantize import fake_quantize, quantize
from snip_megatron.numerics.quantize.reference import Rotation, rotate
from snip_megatron.precision import Gemm

from . import variants_oracle
from .specs import spec


def matrix(rows: int, cols: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, 1, generator=generator).mul(spread).exp()
    return torch.randn(rows, cols, generator=generator) * sizes


@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 999), st.sampled_from([0.3, 2.0, 6.0]))
@settings(max_examples=25, deadline=None)
def test_four_over_six_takes_the_better_scale_of_each_tile(rows: int, cols: int, seed: int, spread: float) -> None:
    x = matrix(rows, cols, seed, spread)
    found = fake_quantize(x, "nvfp4_46").numpy()
    for span, numbers, errors in variants_oracle.four_over_six(x.numpy()):
        tile = found[span]
        same = [bool(np.array_equal(tile, each)) for each in numbers]
        assert any(same)
        # Errors are compared in steps of 2^-20 squared units of the scale: choices that are as good may differ.
        assert min(e for e, s in zip(errors, same, strict=True) if s) <= min(errors) * (1 + 1e-3) + 1e-30


def test_four_over_six_takes_both_and_errs_less() -> None:
    x = matrix(64, 512)
    choices = variants_oracle.four_over_six(x.numpy())
    fours = np.mean([c.errors[1] < c.errors[0] for c in choices])
    assert 0.2 < fours < 0.8
    errors = [float((fake_quantize(x, fmt) - x).square().sum()) for fmt in ("nvfp4_46", "nvfp4")]
    assert errors[0] < 0.9 * errors[1]


def test_a_tile_of_the_tensors_amax_may_have_either_scale() -> None:
    """Its scale is 256 of 448, so that 1.5 of it is an E4M3 number too."""
    x = torch.full((1, 16), 3.0)
    x[0, 0] = 4.0  # 4 and 3 are E2M1 numbers, 6 and 4.5 are not
    assert torch.equal(fake_quantize(x, "nvfp4_46"), x)
    assert not torch.equal(fake_quantize(x, "nvfp4"), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_four_over_six_spoils_one_tile(bad: float) -> None:
    x = matrix(3, 48)
    x[1, 20] = bad
    found = fake_quantize(x, "nvfp4_46")
    assert found.isnan().sum() == 16
    assert found[1, 16:32].isnan().all()


def test_zeros_stay_and_tiny_tiles_survive_as_well_as_in_nvfp4() -> None:
    assert not fake_quantize(torch.zeros(4, 32), "nvfp4_46").any()
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:] = 1.0, 2.0**-18
    assert fake_quantize(x, "nvfp4_46")[0, 16:].any() or not fake_quantize(x, "nvfp4")[0, 16:].any()


# -- Hadamard ------------------------------------------------------------------------------------------------------
@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 2**16 - 1))
@settings(max_examples=25, deadline=None)
def test_the_transform_is_hadamards_matrix_for_each_group(rows: int, cols: int, signs: int) -> None:
    """Whole numbers are added exactly, so that SciPy's matrix in float64 gives the same numbers."""
    x = torch.randint(-50, 50, (rows, cols), generator=torch.Generator().manual_seed(rows)).float()
    flips = np.array([-1.0 if signs >> i & 1 else 1.0 for i in range(16)])
    padded = np.zeros((-(-rows // 16) * 16, cols))
    padded[:rows] = x.numpy()
    groups = padded.reshape(-1, 16, cols) * flips[:, None]
    expected = np.einsum("ij,gjc->gic", hadamard(16) / 4, groups).reshape(-1, cols)
    found = rotate(x, signs)
    np.testing.assert_array_equal(found.numpy(), expected)
    assert torch.equal(rotate(x, torch.tensor([signs], dtype=torch.int32)), found)
    np.testing.assert_allclose(found.double().square().sum(0), x.double().square().sum(0), rtol=1e-6)


def wgrad(g: torch.Tensor, x: torch.Tensor, of_g: Rotation, of_x: Rotation, seed: int = 1) -> torch.Tensor:
    _, left = REFERENCE.quantize(g, spec(None, "nvfp4_hadamard", col_seed=seed, rotation=of_g))
    _, right = REFERENCE.quantize(x, spec(None, "nvfp4_hadamard", rotation=of_x))
    return REFERENCE.multiply(Gemm.WGRAD, left, right, torch.float32)


def test_signs_of_one_operand_alone_give_another_product() -> None:
    x, g = matrix(64, 24, 1), matrix(64, 40, 2)
    exact = g.double().t() @ x.double()
    for signs, close in (((5, 5), True), ((5, 6), False)):
        found = wgrad(g, x, Rotation(signs[0]), Rotation(signs[1]))
        assert bool((found - exact).norm() < 0.5 * exact.norm()) is close


def test_stochastic_rounding_stays_unbiased_under_the_transform() -> None:
    """The mean over draws is the transformed G as far as its tiles reach: scales that round down saturate a little."""
    x, g = matrix(64, 24, 1), matrix(64, 40, 2)
    draws = torch.stack([wgrad(g, x, Rotation(3), Rotation(3), seed=i) for i in range(300)])
    of_g, of_x = quantize(rotate(g, 3), "nvfp4", axis=0), fake_quantize(rotate(x, 3), "nvfp4", axis=0)
    largest = 6.0 * of_g.scale.repeat_interleave(16, 0)
    expected = rotate(g, 3).clamp(-largest, largest).t() @ of_x
    spread = draws.std(0) / 300**0.5
    assert float(((draws.mean(0) - expected) / spread).abs().max()) < 5.5
    assert float((draws[0] - expected).norm()) > 5 * float((draws.mean(0) - expected).norm())
