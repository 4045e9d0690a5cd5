"""Compiled kernels of the statistics at training sizes; small shapes: tests/unit/sensitivity/test_sums.py."""

from types import ModuleType

import pytest
import torch

from snip_megatron.layers.context import StepContext
from snip_megatron.numerics.products.backend import REFERENCE
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.sensitivity import quantization_error as reference
from snip_megatron.sensitivity.recorder import LinearRecorder
from tests.unit.handles import handle_of

FORMATS = ("fp8", "fp4", "fp8_tensor")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from snip_megatron.sensitivity import sums

    return sums


def activations(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, cols, device="cuda", generator=generator)
    x *= torch.randn(rows, 1, device="cuda", generator=generator).exp()
    x[3] = 0.0
    return x.to(torch.bfloat16)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("shape", [(4096, 5120), (1000, 4098), (333, 777)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_tensor_sums(kernels: ModuleType, shape: tuple[int, int], stochastic: bool) -> None:
    x = activations(*shape)
    actual, expected = (module.tensor_sums(x, FORMATS, stochastic=stochastic) for module in (kernels, reference))
    for name in ("rows", "cols", "row_errors", "col_errors"):
        assert_close(getattr(actual, name), getattr(expected, name))
    again = kernels.tensor_sums(x, FORMATS, stochastic=stochastic)
    for name in ("rows", "cols", "row_errors", "col_errors"):
        assert torch.equal(getattr(actual, name), getattr(again, name))


@pytest.mark.parametrize("shape", [(2048, 5120), (333, 777)])
def test_inner_products_with_errors(kernels: ModuleType, shape: tuple[int, int]) -> None:
    """FP32 numbers, whose quotients are hardly ever ties: the sign of a tie's error is arbitrary, and changes a row."""
    x, d = torch.randn(shape, device="cuda"), activations(*shape, seed=1)
    actual, expected = (module.tensor_sums(x, FORMATS, d=d).dots for module in (kernels, reference))
    size = expected.square().mean(1, keepdim=True).sqrt()  # single dots may be close to zero
    assert ((actual - expected) / size).abs().quantile(0.995) < 1e-2


def test_sums_of_a_weight_and_squares(kernels: ModuleType) -> None:
    w = activations(5120, 4096 + 640)
    assert_close(kernels.weight_sums(w, FORMATS), reference.weight_sums(w, FORMATS))
    for tensor in (w, w.float(), w[:, 1:]):
        assert_close(kernels.sum_squares(tensor), tensor.double().square().sum())


def recorded(device: str) -> LinearRecorder:
    """One linear's statistics, on the device's own path."""
    generator = torch.Generator().manual_seed(5)
    x, w, g = (
        (torch.randn(shape, generator=generator) * scale).bfloat16().to(device)
        for shape, scale in (((1536, 512), 1.0), ((768, 512), 0.05), ((1536, 768), 1e-3))
    )
    backend = select_backend("auto").backend if device == "cuda" else REFERENCE
    handle = handle_of("decoder.layers.1.mlp.linear_fc1", 768, 512, StepContext(backend=backend))
    handle.module.to(device)
    recorder = LinearRecorder(handle, FORMATS, 128)
    d = g @ w
    recorder.on_backward(x, w, g, d, d)
    return recorder


def test_a_recorder_on_the_gpu_measures_what_one_on_the_cpu_does() -> None:
    result, expected = recorded("cuda"), recorded("cpu")
    for name, value in expected.sums.items():
        actual = result.sums[name].cpu()
        # fp8 GEMMs accumulate with an error of 1.3e-4 of Y, 1e-3 under one scale a tensor; d2 is a bf16 product's.
        torch.testing.assert_close(actual, value, rtol=5e-3 if name in ("e2", "d2") else 1e-4, atol=0, msg=name)
    c2, reference = result.dots[0].squared().cpu(), expected.dots[0].squared()
    torch.testing.assert_close(c2, reference, rtol=2e-2, atol=0)
