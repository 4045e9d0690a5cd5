"""Sums of squares and of quantisation errors; the expectation that stands for stochastic rounding."""

import pytest
import torch

from snip_megatron.numerics.quantize import fake_quantize
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
    found = tensor_sums(x, FORMATS)
    exact = x.double()
    torch.testing.assert_close(found.rows, exact.square().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.cols, exact.square().sum(0), rtol=1e-6, atol=0)
    for i, fmt in enumerate(FORMATS):
        along, down = (fake_quantize(x, fmt, axis=axis).double() - exact for axis in (-1, 0))
        assert float(found.row_errors[i]) == pytest.approx(float(along.square().sum()), rel=1e-6)
        torch.testing.assert_close(found.col_errors[i], down.square().sum(0), rtol=1e-6, atol=0)


def test_weights_are_quantised_in_blocks() -> None:
    w = matrix(300, 200)
    found = weight_sums(w, ("fp4", "fp8"))
    errors = [fake_quantize(w, fmt, block=True).double() - w.double() for fmt in ("fp4", "fp8")]
    expected = torch.stack([w.double().square().sum(), *(e.square().sum() for e in errors)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_the_whole_tensor_s_amax_decides_where_a_format_asks() -> None:
    x = matrix()
    amax = 1e4 * x.abs().max().float()
    found = tensor_sums(x, ("fp8_tensor",), amax=amax)
    error = fake_quantize(x, "fp8_tensor", tensor_amax=amax).double() - x.double()
    assert float(found.row_errors[0]) == pytest.approx(float(error.square().sum()), rel=1e-6)
    assert float(found.row_errors[0]) > 1.5 * float(tensor_sums(x, ("fp8_tensor",)).row_errors[0])


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


def test_output_sums() -> None:
    generator = torch.Generator().manual_seed(1)
    quantised, exact, g = (torch.randn(5, 7, generator=generator) for _ in range(3))
    dots, squares = output_sums(quantised, exact, g.bfloat16())
    error = (quantised - exact).double()
    torch.testing.assert_close(dots, (error * g.bfloat16().double()).sum(1), rtol=1e-6, atol=1e-6)
    assert float(squares) == pytest.approx(float(error.square().sum()), rel=1e-6)
