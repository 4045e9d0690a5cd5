"""The statistics' kernels against torch, in Triton's interpreter: in a process of its own, because the interpreter must
be chosen before the first import of triton, and Megatron imports it. Compiled kernels: tests/gpu/test_statistics.py."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

from snip_megatron.sensitivity import quantization_error, sums

Run = Callable[..., Any]


@pytest.fixture
def interpreted(interpreter: ProcessPoolExecutor) -> Run:
    """Calls a function of this module where kernels are interpreted."""
    return lambda *call, **options: interpreter.submit(*call, **options).result(timeout=300)


def matrix(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows and columns of very different size, a zero row and a zero column."""
    generator = torch.Generator().manual_seed(rows + cols)
    spread = torch.randn(rows, 1, generator=generator).mul(3).exp() * torch.randn(cols, generator=generator).exp()
    x = torch.randn(rows, cols, generator=generator) * spread
    x[:1], x[:, -1:] = 0.0, 0.0
    return x.to(dtype)


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative difference; both zero: none."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == torch.float64
    return float(((actual - expected).abs() / expected.abs().clamp(min=1e-300)).max()) if actual.numel() else 0.0


def implementations() -> tuple[ModuleType, ModuleType]:
    """The kernels, taken where they are interpreted, and the reference."""
    sums.has_kernels = lambda x: True  # type: ignore[attr-defined]
    return sums, quantization_error


def worst_of_sums(shape: tuple[int, int], dtype: torch.dtype, *arguments: Any, **options: Any) -> float:
    """Largest relative difference of the sums over an operand, and over it as a weight."""
    x = matrix(*shape, dtype)
    actual, expected = (module.tensor_sums(x, *arguments, **options) for module in implementations())
    names = ("rows", "cols", "row_errors", "col_errors")
    amax = options.get("amax")
    weights = worst(*(module.weight_sums(x, *arguments, amax=amax) for module in implementations()))
    return max(weights, *(worst(getattr(actual, name), getattr(expected, name)) for name in names))


@pytest.mark.parametrize(
    "formats", [("fp8", "fp4"), ("fp4",), ("mxfp4", "fp8_tensor", "fp4"), ("nvfp4",), ("fp8", "nvfp4_hadamard")]
)
@pytest.mark.parametrize("stochastic", [False, True])
def test_sums_with_tails(interpreted: Run, formats: tuple[str, ...], stochastic: bool) -> None:
    assert interpreted(worst_of_sums, (200, 300), torch.bfloat16, formats, stochastic=stochastic) < 1e-4


@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (129, 1), (0, 8)])
def test_sums_of_small_shapes(interpreted: Run, shape: tuple[int, int]) -> None:
    assert interpreted(worst_of_sums, shape, torch.bfloat16, ("fp8", "fp4")) < 1e-4


def test_the_amax_of_all_shards(interpreted: Run) -> None:
    amax = torch.tensor(1e5)
    assert interpreted(worst_of_sums, (140, 150), torch.bfloat16, ("fp8_tensor",), amax=amax) < 1e-4


def worst_of_dots(formats: tuple[str, ...]) -> float:
    """FP32 numbers, whose quotients are no ties: the sign of the error of a tie is arbitrary."""
    x, d = matrix(200, 300, torch.float32), matrix(300, 200, torch.bfloat16).t()
    actual, expected = (module.tensor_sums(x, formats, d=d).dots for module in implementations())
    size = expected.square().mean(1, keepdim=True).sqrt()  # single dots may be close to zero
    return float(((actual - expected) / size).abs().max())


@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("mxfp4", "fp8_tensor", "fp4")])
def test_inner_products_with_errors(interpreted: Run, formats: tuple[str, ...]) -> None:
    assert interpreted(worst_of_dots, formats) < 1e-4


def broken_columns(number: float) -> list[list[int]]:
    """Columns whose error sums are no numbers, by the kernel and by the reference."""
    x = matrix(200, 300, torch.float32)
    x[150, 7] = number
    result = [m.tensor_sums(x, ("fp8", "fp4"), stochastic=True).col_errors[1] for m in implementations()]
    return [torch.nonzero(~sums.isfinite())[:, 0].tolist() for sums in result]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(interpreted: Run, number: float) -> None:
    assert interpreted(broken_columns, number) == [[7], [7]]
