"""The statistics' kernels against torch, in Triton's interpreter: in a process of its own, because the interpreter must
be chosen before the first import of triton, and Megatron imports it. Compiled kernels: tests/gpu/test_statistics.py."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

Run = Callable[..., Any]


@pytest.fixture
def interpreted(interpreter: ProcessPoolExecutor) -> Run:
    """Calls a function of this module where kernels are interpreted."""
    return lambda function, *arguments: interpreter.submit(function, *arguments).result(timeout=300)


def matrix(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows and columns of very different size, a zero row and a zero column."""
    generator = torch.Generator().manual_seed(rows + cols)
    spread = torch.randn(rows, 1, generator=generator).mul(3).exp() * torch.randn(cols, generator=generator).exp()
    x = torch.randn(rows, cols, generator=generator) * spread
    x[0], x[:, -1] = 0.0, 0.0
    return x.to(dtype)


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative difference; both zero: none."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == torch.float64
    return float(((found - expected).abs() / expected.abs().clamp(min=1e-300)).max()) if found.numel() else 0.0


def sums_differ(rows: int, cols: int, dtype: torch.dtype, formats: tuple[str, ...], stochastic: bool) -> float:
    from snip_megatron.statistics import errors
    from snip_megatron.statistics.kernels import sums as triton_sums

    x = matrix(rows, cols, dtype)
    found, expected = (module.tensor_sums(x, formats, stochastic=stochastic) for module in (triton_sums, errors))
    names = ("rows", "cols", "row_errors", "col_errors")
    weights = worst(triton_sums.weight_sums(x, formats), errors.weight_sums(x, formats))
    return max(weights, *(worst(getattr(found, name), getattr(expected, name)) for name in names))


def dots_differ(formats: tuple[str, ...]) -> float:
    """FP32, whose quotients are no ties: there the sign of an error is anyone's."""
    from snip_megatron.statistics import errors
    from snip_megatron.statistics.kernels import sums as triton_sums

    x, d = matrix(200, 300, torch.float32), matrix(300, 200, torch.bfloat16).t()
    found, expected = (module.tensor_sums(x, formats, d=d).dots for module in (triton_sums, errors))
    size = expected.square().mean(1, keepdim=True).sqrt()  # single dots may be close to zero
    return float(((found - expected) / size).abs().max())


@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("mxfp4", "fp8_tensor", "fp4")])
def test_inner_products_with_errors(interpreted: Run, formats: tuple[str, ...]) -> None:
    assert interpreted(dots_differ, formats) < 1e-4


@pytest.mark.parametrize(
    "formats",
    [("fp8", "fp4"), ("fp4",), ("mxfp4", "fp8_tensor", "fp4"), ("nvfp4",), ("fp8", "nvfp4_hadamard")],
)
@pytest.mark.parametrize("stochastic", [False, True])
def test_sums_with_tails(interpreted: Run, formats: tuple[str, ...], stochastic: bool) -> None:
    assert interpreted(sums_differ, 200, 300, torch.bfloat16, formats, stochastic) < 1e-4


@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (129, 1), (0, 8)])
def test_sums_of_small_shapes(interpreted: Run, shape: tuple[int, int]) -> None:
    if shape[0]:
        assert interpreted(sums_differ, *shape, torch.bfloat16, ("fp8", "fp4"), False) < 1e-4
    else:
        assert interpreted(empty_sums) == [0.0] * 4


def empty_sums() -> list[float]:
    from snip_megatron.statistics.kernels import sums as triton_sums

    found = triton_sums.tensor_sums(torch.zeros(0, 8), ("fp8", "fp4"))
    return [float(part.sum()) for part in (found.rows, found.cols, found.row_errors, found.col_errors)]


def whole_amax_differs() -> float:
    from snip_megatron.statistics import errors
    from snip_megatron.statistics.kernels import sums as triton_sums

    x, amax = matrix(140, 150, torch.bfloat16), torch.tensor(1e5)
    found, expected = (m.tensor_sums(x, ("fp8_tensor",), amax=amax) for m in (triton_sums, errors))
    return max(worst(found.row_errors, expected.row_errors), worst(found.col_errors, expected.col_errors))


def test_the_amax_of_all_shards(interpreted: Run) -> None:
    assert interpreted(whole_amax_differs) < 1e-4


def broken_columns(number: float) -> tuple[list[int], list[int]]:
    """Columns whose error sums are no numbers, by the kernel and by the reference."""
    from snip_megatron.statistics import errors
    from snip_megatron.statistics.kernels import sums as triton_sums

    x = matrix(200, 300, torch.float32)
    x[150, 7] = number
    found = [m.tensor_sums(x, ("fp8", "fp4"), stochastic=True).col_errors[1] for m in (triton_sums, errors)]
    return tuple(torch.nonzero(~sums.isfinite())[:, 0].tolist() for sums in found)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(interpreted: Run, number: float) -> None:
    found, expected = interpreted(broken_columns, number)
    assert found == expected == [7]


def outputs_differ(rows: int, cols: int) -> float:
    from snip_megatron.statistics import errors
    from snip_megatron.statistics.kernels import sums as triton_sums

    generator = torch.Generator().manual_seed(3)
    exact, noise, g = (torch.randn(rows, cols, generator=generator) for _ in range(3))
    arguments = exact + 0.1 * noise, exact, g.bfloat16()
    found, expected = (module.output_sums(*arguments) for module in (triton_sums, errors))
    size = float(expected[0].square().mean().sqrt())  # single dots may be close to zero
    return max(float((found[0] - expected[0]).abs().max()) / size, worst(found[1], expected[1]))


def test_output_sums(interpreted: Run) -> None:
    assert interpreted(outputs_differ, 3, 5000) < 1e-5


def squares_differ(count: int) -> float:
    from snip_megatron.statistics.kernels import sums as triton_sums

    x = matrix(1, count, torch.bfloat16)[:, :-1] if count else torch.zeros(0)
    return float((triton_sums.sum_squares(x) - x.double().square().sum()).abs())


def test_sum_squares(interpreted: Run) -> None:
    assert interpreted(squares_differ, 0) == 0.0
    assert interpreted(squares_differ, 10_000) < 1e-2


# -- drift -----------------------------------------------------------------------------------------------------
RHOS = [1e-4, 1e-2, 0.3, 10.0]


def drift_differs(start: int, end: int, step: int, noise: float, device: str = "cpu") -> list[float]:
    """Relative differences to float64 by ρ, then of two candidates' drifts."""
    from snip_megatron.optimizers.kernels.update_error import ErrorSizes, error_sums
    from snip_megatron.optimizers.signs import error_signs
    from snip_megatron.optimizers.updates import AdamWState, gradient_of_a_step

    rows, cols = torch.arange(50) + 5, torch.randperm(130, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    count = end - start
    size = torch.randn(count, generator=generator).mul(3).exp() * 1e-6
    m, v = torch.randn(count, generator=generator) * size, (size * torch.rand(count, generator=generator)).square()
    m[:40], v[:40] = 0.0, 0.0  # never had a gradient
    if step == 0:
        m, v = m * 0, v * 0
    gradient = torch.randn(50 * 130, generator=generator) * 1e-6
    gradient[start : start + 20] = 0.0

    def norms(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    sizes = ErrorSizes(
        9, rows, cols, norms(50) * 1e-6, norms(130), norms(3, 50) * torch.tensor([[1e-12], [1e-15], [1e-14]]),
        norms(3, 130) * torch.tensor([[10.0], [1e-2], [0.1]]),
    )  # fmt: skip
    exact = AdamWState(start, end, step, m.double(), v.double(), 0.9, 0.95, 1e-8)
    kept = AdamWState(start, end, step, m.to(device), v.to(device), 0.9, 0.95, 1e-8)
    found = error_sums(gradient[start:end].to(device), kept, _moved(sizes, device), RHOS, factor=0.7, noise=noise)
    z = error_signs(9, rows, cols).view(-1)[start:end].double()
    g = gradient_of_a_step(gradient[start:end].double() * 0.7, exact, noise)
    unit = torch.outer(sizes.unit_rows, sizes.unit_cols).view(-1)[start:end] * z
    expected = [exact.squared_error(g, unit, RHOS)]
    assert sizes.var_rows is not None
    assert sizes.var_cols is not None
    for f in (1, 2):
        variance = torch.outer(sizes.var_rows[f], sizes.var_cols[0])
        variance = (variance + torch.outer(sizes.var_rows[0], sizes.var_cols[f])).view(-1)[start:end]
        expected.append(exact.squared_error(g, variance.sqrt() * z, [1.0]))
    return [float(d) for d in (torch.cat(found).cpu() / torch.cat(expected) - 1.0).abs()]


def _moved(sizes: Any, device: str) -> Any:
    fields = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in vars(sizes).items()
    }
    return type(sizes)(**fields)


@pytest.mark.parametrize(("start", "end"), [(0, 6500), (77, 4001)])
@pytest.mark.parametrize(("step", "noise"), [(7, 0.5), (7, 1.0), (0, 0.5)])
def test_drift_is_the_difference_of_two_updates(
    interpreted: Run, start: int, end: int, step: int, noise: float
) -> None:
    assert max(interpreted(drift_differs, start, end, step, noise)) < 1e-4
