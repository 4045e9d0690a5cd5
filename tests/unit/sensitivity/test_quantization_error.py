"""Sums of squares and of quantisation errors; the expectation that stands for stochastic rounding."""

import pytest
import torch

from snip_megatron.numerics.quantize import fake_quantize
from snip_megatron.numerics.quantize.reference import Rotation, rotate
from snip_megatron.precision import Format, Gemm
from snip_megatron.sensitivity.quantization_error import output_sums, squared_errors, tensor_sums, weight_sums

FORMATS = ("fp8", "fp4", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8")


def matrix(rows: int = 200, cols: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    spread = torch.randn(rows, 1, generator=generator).exp() * torch.randn(cols, generator=generator).exp()
    x = torch.randn(rows, cols, generator=generator) * spread
    x[0] = 0.0
    return x.bfloat16()


def test_sums_are_those_of_the_quantisers() -> None:
    x = matrix()
    result = tensor_sums(x, FORMATS)
    exact = x.double()
    torch.testing.assert_close(result.rows, exact.square().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(result.cols, exact.square().sum(0), rtol=1e-6, atol=0)
    for i, fmt in enumerate(FORMATS):
        along, down = (fake_quantize(x, fmt, axis=axis).double() - exact for axis in (-1, 0))
        assert float(result.row_errors[i]) == pytest.approx(float(along.square().sum()), rel=1e-6)
        torch.testing.assert_close(result.col_errors[i], down.square().sum(0), rtol=1e-6, atol=0)


def test_weights_are_quantised_in_blocks() -> None:
    w = matrix(300, 200)
    actual = weight_sums(w, ("fp4", "fp8"))
    errors = [fake_quantize(w, fmt, block=True).double() - w.double() for fmt in ("fp4", "fp8")]
    expected = torch.stack([w.double().square().sum(), *(e.square().sum() for e in errors)])
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_the_whole_tensor_s_amax_decides_where_a_format_asks() -> None:
    x = matrix()
    amax = 1e4 * x.abs().max().float()
    result = tensor_sums(x, ("fp8_tensor",), amax=amax)
    error = fake_quantize(x, "fp8_tensor", tensor_amax=amax).double() - x.double()
    assert float(result.row_errors[0]) == pytest.approx(float(error.square().sum()), rel=1e-6)
    assert float(result.row_errors[0]) > 1.5 * float(tensor_sums(x, ("fp8_tensor",)).row_errors[0])


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("fmt", ["fp4", "nvfp4", "mxfp4"])
def test_stochastic_errors_are_their_expectation(fmt: str, axis: int) -> None:
    x = matrix(64, 160)
    draws = 400
    total = torch.zeros(x.shape)
    for seed in range(draws):
        total += (fake_quantize(x, fmt, axis=axis, rounding="stochastic", seed=seed) - x.float()).square()
    expected = squared_errors(x, fmt, axis=axis, stochastic=True)
    assert float(total.sum() / draws / expected.sum()) == pytest.approx(1.0, abs=0.01)
    # Of one element as well: a draw is one of two numbers, whose mean of 400 is off by far less than half.
    large = expected > 0.25 * expected.amax()
    assert ((total / draws / expected)[large] - 1.0).abs().max() < 0.5


VARIANTS = ("nvfp4_46", "nvfp4_hadamard", "mxfp4_hadamard_fixed", "nvfp4")


@pytest.mark.parametrize("gradient", [False, True])
def test_a_variant_has_errors_on_its_own_gemms_by_its_own_rule(gradient: bool) -> None:
    x = matrix(70, 96)
    rotations = {"nvfp4_hadamard": Rotation(0b1010_0110_0000_1111)}
    result = tensor_sums(x, VARIANTS, stochastic=gradient, rotations=rotations, d=x if not gradient else None)
    for i, fmt in enumerate(VARIANTS):
        gemms, base = Format(fmt).gemms, Format(fmt).base.value
        along = squared_errors(x, fmt, stochastic=gradient).double()
        if (Gemm.DGRAD if gradient else Gemm.FPROP) not in gemms:
            along = along * 0
        assert float(result.row_errors[i]) == pytest.approx(float(along.sum()), rel=1e-6)
        down = x if "hadamard" not in fmt else rotate(x, rotations[fmt].signs if fmt in rotations else 0)
        down = squared_errors(down, base, axis=0, stochastic=gradient).double().sum(0)
        down = down if Gemm.WGRAD in gemms else down * 0
        torch.testing.assert_close(result.col_errors[i], down, rtol=1e-6, atol=0)
        if result.dots is not None:
            assert bool(result.dots[1 + i].any()) is (Gemm.FPROP in gemms)


def test_the_errors_of_a_transformed_tensor_are_those_of_what_it_is_transformed_back_to() -> None:
    """Column norms of Q(Hx) − Hx are those of HᵀQ(Hx) − x, the error of the operand that the product is taken with."""
    x = matrix(64, 40).float()
    turned = rotate(x, 5)
    back = rotate(fake_quantize(turned, "mxfp4", axis=0))  # H is its own transpose; the signs come off last
    flips = torch.tensor([-1.0 if 5 >> i & 1 else 1.0 for i in range(16)]).repeat(4)[:, None]
    expected = (back * flips - x).double().square().sum(0)
    actual = tensor_sums(x, ("mxfp4_hadamard",), rotations={"mxfp4_hadamard": Rotation(5)}).col_errors[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-9)


def test_weights_of_variants() -> None:
    w = matrix(96, 80)
    actual = weight_sums(w, VARIANTS)[1:]
    expected = [squared_errors(w, fmt, block=True).double().sum() for fmt in ("nvfp4_46", "nvfp4")]
    torch.testing.assert_close(actual[[0, 3]], torch.stack(expected))
    assert not actual[1:3].any()  # formats of wgrad alone, which reads no weight
    assert actual[0] < actual[3]


def test_output_sums() -> None:
    generator = torch.Generator().manual_seed(1)
    quantised, exact, g = (torch.randn(5, 7, generator=generator) for _ in range(3))
    dots, squares = output_sums(quantised, exact, g.bfloat16())
    error = (quantised - exact).double()
    torch.testing.assert_close(dots, (error * g.bfloat16().double()).sum(1), rtol=1e-6, atol=1e-6)
    assert float(squares) == pytest.approx(float(error.square().sum()), rel=1e-6)
