"""The reference against independent quantisers in numpy, bit for bit: formats, scaling, variants, NaN and Inf."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.linalg import hadamard

from snip_megatron.numerics.products.backend import REFERENCE
from snip_megatron.numerics.quantize import fake_quantize, quantize, quantize_dequantize
from snip_megatron.numerics.quantize.reference import Rotation, rotate
from snip_megatron.precision import Gemm
from snip_megatron.precision.errors import SnipError

from . import oracle
from .specs import spec

GRANULARITIES = ("tile", "block")
every_format = pytest.mark.parametrize("fmt", oracle.FORMATS)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


def matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers whose rows and columns differ in size by orders of magnitude."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)) * np.exp(rng.normal(0, 3, (rows, 1))) * np.exp(rng.normal(0, 1, cols))
    return torch.from_numpy(x.astype(np.float32))


def assert_same(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy(), theirs)


@every_format
@every_granularity
@pytest.mark.parametrize("shape", [(128, 256), (1, 1), (3, 130), (129, 127), (257, 300), (16, 33)])
def test_agrees_with_the_oracle_tails_included(fmt: str, granularity: str, shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    assert_same(quantize_dequantize(x, fmt, granularity), oracle.quantize_dequantize(x.numpy(), fmt, granularity))


@every_format
@every_granularity
@given(
    patterns=arrays(
        np.uint32,
        st.tuples(st.integers(1, 5), st.integers(1, 140)),
        elements=st.integers(0, 2**32 - 1),
        fill=st.just(0),
    )
)
@settings(max_examples=25)
def test_agrees_with_the_oracle_on_any_bit_pattern(fmt: str, granularity: str, patterns: np.ndarray) -> None:
    x = patterns.view(np.float32)
    with np.errstate(all="ignore"):
        theirs = oracle.quantize_dequantize(x, fmt, granularity)
    assert_same(quantize_dequantize(torch.from_numpy(x.copy()), fmt, granularity), theirs)


@every_format
@pytest.mark.parametrize("magnitude", [1e-45, 4e-45, 3e-43, 1e-41, 1e-38, 1e-30, 1e30, 3.3e38])
def test_subnormal_and_extreme_tiles_stay_finite_and_agree(fmt: str, magnitude: float) -> None:
    unit = torch.linspace(-1, 1, 3 * 200).view(3, 200).double()
    x = (unit * magnitude).to(torch.float32)
    ours = quantize_dequantize(x, fmt, "tile")
    assert ours.isfinite().all()
    assert_same(ours, oracle.quantize_dequantize(x.numpy(), fmt))
    stochastic = quantize_dequantize(x, fmt, "tile", rounding="stochastic", seed=1)
    assert stochastic.isfinite().all()


@every_format
def test_input_is_not_written_to(fmt: str) -> None:
    for shape in ((128, 128), (1, 128), (128, 1), (1, 1)):
        x = matrix(*shape)
        original = x.clone()
        for rounding in ("nearest", "stochastic"):
            quantize_dequantize(x, fmt, "tile", rounding=rounding, seed=1)
        assert torch.equal(x, original)


@every_format
@every_granularity
@pytest.mark.parametrize("poison", [float("nan"), -float("inf")])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nan_and_inf_fill_their_tile_and_no_other(fmt: str, granularity: str, poison: float, rounding: str) -> None:
    x = matrix(256, 384)
    clean = quantize_dequantize(x, fmt, granularity, rounding=rounding, seed=4)
    # the largest tile stays clean, so that nvfp4's tensor scale does too
    row, col = next((r, c) for r, c in ((5, 200), (200, 300)) if abs(x[r, c]) < x.abs().max() / 10)
    x[row, col] = poison
    out = quantize_dequantize(x, fmt, granularity, rounding=rounding, seed=4)
    height, width = oracle.tile_shape(fmt, granularity, (256, 384))
    inside = torch.zeros_like(out, dtype=torch.bool)
    first_row, first_col = row // height * height, col // width * width
    inside[first_row : first_row + height, first_col : first_col + width] = True
    assert out[inside].isnan().all()
    assert torch.equal(out[~inside], clean[~inside])


@every_format
def test_a_shard_with_its_offset_is_the_slice_of_the_whole(fmt: str) -> None:
    x = matrix(256, 512)
    amax = x.abs().max()
    options = {"rounding": "stochastic", "seed": 2**63 + 17, "tensor_amax": amax}
    whole = fake_quantize(x, fmt, **options)
    shard = fake_quantize(x[128:, 256:], fmt, offset=(128, 256), **options)
    assert torch.equal(shard, whole[128:, 256:])
    # a SwiGLU shard: columns of both halves
    cols = torch.cat([torch.arange(128, 256), torch.arange(384, 512)])
    swiglu = fake_quantize(x[:, cols], fmt, cols=cols, **options)
    assert torch.equal(swiglu, whole[:, cols])
    moved = fake_quantize(x[128:, 256:], fmt, **options)
    assert not torch.equal(moved, whole[128:, 256:])


@every_format
@pytest.mark.parametrize("block", [False, True])
def test_quantize_holds_element_values_and_scales(fmt: str, block: bool) -> None:
    x = matrix(200, 300)
    q = quantize(x, fmt, block=block)
    dtype, maximum = oracle.ELEMENTS[fmt]
    np.testing.assert_array_equal(q.values.numpy().astype(dtype).astype(np.float32), q.values.numpy())
    assert q.values.abs().max() <= maximum
    assert q.tile == oracle.tile_shape(fmt, "block" if block else "tile", (200, 300))
    assert q.scale.shape == (-(-200 // q.tile[0]), -(-300 // q.tile[1]))
    assert torch.equal(q.dequantize(), fake_quantize(x, fmt, block=block))
    assert (q.factors is not None) == (fmt == "nvfp4")
    if q.factors is not None:
        tiles, whole = q.factors
        assert torch.equal(tiles * whole, q.scale)
        np.testing.assert_array_equal(tiles.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32), tiles.numpy())


def test_the_scale_of_a_tile_of_negative_zeros_is_a_positive_zero() -> None:
    x = torch.full((2, 16), -0.0)
    x[1] = 3.0
    factors = quantize(x, "nvfp4").factors
    assert factors[0].flatten().tolist() == [0.0, 448.0]
    assert not factors[0].signbit().any()


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0)])
@every_format
def test_empty_tensors_go_through(fmt: str, shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert quantize_dequantize(x, fmt, "tile", rounding="stochastic", seed=1).shape == shape
    assert quantize(x, fmt).dequantize().shape == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "fp5"}, "'fp5' cannot be quantised to"),
        ({"granularity": "row"}, "granularity 'row'"),
        ({"rounding": "up"}, "rounding 'up'"),
        ({"rounding": "stochastic"}, "needs a seed"),
        ({"x": torch.zeros(2, 3, 4)}, r"2-D tensor .* \(2, 3, 4\)"),
        ({"x": torch.zeros(2, 2, dtype=torch.float64)}, "not torch.float64"),
    ],
)
def test_bad_input_is_one_clear_line(change: dict, message: str) -> None:
    arguments = {"x": torch.zeros(2, 2), "format": "fp4", "granularity": "tile"} | change
    with pytest.raises(SnipError, match=message) as error:
        quantize_dequantize(**arguments)
    assert "\n" not in str(error.value)


def spread_matrix(rows: int, cols: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, 1, generator=generator).mul(spread).exp()
    return torch.randn(rows, cols, generator=generator) * sizes


@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 999), st.sampled_from([0.3, 2.0, 6.0]))
@settings(max_examples=25, deadline=None)
def test_four_over_six_takes_the_better_scale_of_each_tile(rows: int, cols: int, seed: int, spread: float) -> None:
    x = spread_matrix(rows, cols, seed, spread)
    result = fake_quantize(x, "nvfp4_46").numpy()
    for span, numbers, errors in oracle.four_over_six(x.numpy()):
        tile = result[span]
        same = [bool(np.array_equal(tile, each)) for each in numbers]
        assert any(same)
        # Errors are compared in steps of 2^-20 squared units of the scale: choices that are as good may differ.
        assert min(e for e, s in zip(errors, same, strict=True) if s) <= min(errors) * (1 + 1e-3) + 1e-30


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
    actual = rotate(x, signs)
    np.testing.assert_array_equal(actual.numpy(), expected)
    assert torch.equal(rotate(x, torch.tensor([signs], dtype=torch.int32)), actual)
    np.testing.assert_allclose(actual.double().square().sum(0), x.double().square().sum(0), rtol=1e-6)


def wgrad(g: torch.Tensor, x: torch.Tensor, of_g: Rotation, of_x: Rotation, seed: int = 1) -> torch.Tensor:
    _, left = REFERENCE.quantize(g, spec(None, "nvfp4_hadamard", col_seed=seed, rotation=of_g))
    _, right = REFERENCE.quantize(x, spec(None, "nvfp4_hadamard", rotation=of_x))
    return REFERENCE.multiply(Gemm.WGRAD, left, right, torch.float32)


def test_stochastic_rounding_stays_unbiased_under_the_transform() -> None:
    """The mean over draws is the transformed G as far as its tiles reach: scales that round down saturate a little."""
    x, g = spread_matrix(64, 24, 1), spread_matrix(64, 40, 2)
    draws = torch.stack([wgrad(g, x, Rotation(3), Rotation(3), seed=i) for i in range(300)])
    of_g, of_x = quantize(rotate(g, 3), "nvfp4", axis=0), fake_quantize(rotate(x, 3), "nvfp4", axis=0)
    largest = 6.0 * of_g.scale.repeat_interleave(16, 0)
    expected = rotate(g, 3).clamp(-largest, largest).t() @ of_x
    spread = draws.std(0) / 300**0.5
    assert float(((draws.mean(0) - expected) / spread).abs().max()) < 5.5
    assert float((draws[0] - expected).norm()) > 5 * float((draws.mean(0) - expected).norm())
