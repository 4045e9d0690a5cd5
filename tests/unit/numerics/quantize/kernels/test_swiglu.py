"""The kernels that quantise SwiGLU and its gradient, bit for bit: interpreted on a CPU, compiled where a GPU is found.

The expected activation comes from numpy on a CPU, whose exponential the interpreter uses; ``quantize/swiglu.py``
uses torch's, which differs in the last bit. On a GPU it comes from Megatron's own functions (tests/gpu).
"""

from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from snip_megatron.numerics.quantize import operands, swiglu
from snip_megatron.numerics.quantize.rounding import key_words

from ..specs import spec
from .interpreter import Quantizers
from .test_quantize import assert_operands, assert_same


@pytest.fixture(scope="module")
def quantizers(interpreter: ProcessPoolExecutor) -> Quantizers:
    running = Quantizers(interpreter)
    if running.on_gpu:
        pytest.skip("tests/gpu/test_swiglu.py compares the kernels with compiled functions")
    return running


def tensors(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """d [rows, k] and y [rows, 2k] in bf16, with rows of very different size, zeros, NaN and gates that saturate."""
    generator = torch.Generator().manual_seed(rows + k)
    spread = torch.randn(rows, 1, generator=generator).mul(2).exp()
    d, y = (torch.randn(rows, n, generator=generator) * spread for n in (k, 2 * k))
    y[0], y[-1, 0], y[1, 3], d[2, 5] = 0.0, -300.0, 89.0, float("nan")
    return d.to(torch.bfloat16), y.to(torch.bfloat16)


def rounded(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(torch.bfloat16)


@np.errstate(all="ignore")
def activation(y: torch.Tensor, probs: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = np.split(y.float().numpy(), 2, axis=1)
    x = gate / (1 + np.exp(-gate)) * up
    return rounded(x if probs is None else x * probs.numpy()[:, None])


@np.errstate(all="ignore")
def gradient(d: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    gate, up = np.split(y.float().numpy(), 2, axis=1)
    g, sigmoid = d.float().numpy(), 1 / (1 + np.exp(-gate))
    return rounded(np.concatenate([g * sigmoid * (1 + gate * (1 - sigmoid)) * up, g * (gate / (1 + np.exp(-gate)))], 1))


@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("fp4", "fp8"), ("fp4", None)])
def test_swiglu_and_its_gradient(quantizers: Quantizers, formats: tuple[str | None, str | None]) -> None:
    (d, y), how = tensors(200, 256), spec(*formats)
    result = quantizers.call("quantize_swiglu", y, how), quantizers.call("quantize_swiglu_gradient", d, y, how)[:2]
    for sides, matrix in zip(result, (activation(y), gradient(d, y)), strict=True):
        assert_operands(sides, operands.quantize_operands(matrix, how))


@pytest.mark.parametrize("formats", [("fp8", "bf16"), ("bf16", "bf16"), ("fp4", None)])
def test_rows_with_factors(quantizers: Quantizers, formats: tuple[str, str | None]) -> None:
    """An expert's rows are multiplied by their probabilities. In bf16 an operand is the matrix itself."""
    (d, y), how = tensors(200, 256), spec(*formats)
    d[2, 5] = 0.0
    probs = torch.rand(200, generator=torch.Generator().manual_seed(1))
    x, g = activation(y, probs), gradient((d.float() * probs[:, None]), y)
    actual = quantizers.call("quantize_swiglu", y, how, probs)
    *of_y, of_probs = quantizers.call("quantize_swiglu_gradient", d, y, how, probs)
    for sides, matrix in ((actual, x), (of_y, g)):
        for side, expected, name in zip(sides, operands.quantize_operands(matrix, how), formats, strict=True):
            if name == "bf16":
                assert torch.equal(side.view(torch.int16), matrix.view(torch.int16))
            else:
                assert_same(side, expected)
    gate, up = y.double().chunk(2, -1)
    exact = (d.double() * torch.nn.functional.silu(gate) * up).sum(1)
    torch.testing.assert_close(of_probs.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize(("step", "on_device"), [(1, False), (3, True)])
def test_gradient_is_rounded_stochastically(quantizers: Quantizers, step: int, on_device: bool) -> None:
    d, y = tensors(136, 128)
    seeds = (2**63 + 5, 7)
    keys = [torch.tensor(key_words(seed)).to(torch.int32) if on_device else seed for seed in seeds]
    cols = torch.arange(256) * step + 4
    reference = spec("fp4", "fp4", row_seed=seeds[0], col_seed=seeds[1], cols=cols)
    how = spec("fp4", "fp4", row_seed=keys[0], col_seed=keys[1], cols=cols)
    how = how._replace(keys=how.keys._replace(paired=step == 1))  # type: ignore[union-attr]
    expected = operands.quantize_operands(gradient(d, y), reference)
    assert_operands(quantizers.call("quantize_swiglu_gradient", d, y, how)[:2], expected)


def assert_with_amax(actual: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor) -> None:
    x, amax = actual
    assert x.dtype is expected.dtype
    assert amax.dtype is torch.float32
    assert torch.equal(x.isnan(), expected.isnan())
    assert torch.equal(x.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))
    torch.testing.assert_close(amax, expected.abs().amax().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("gate", [89.0, float("nan"), float("inf")])
def test_swiglu_with_amax(quantizers: Quantizers, gate: float) -> None:
    d, y = tensors(200, 256)
    d[2, 5], y[150, 130] = 0.0, gate
    assert_with_amax(quantizers.call("swiglu_with_amax", y), activation(y))
    assert_with_amax(quantizers.call("swiglu_with_amax", y, d), gradient(d, y))
    assert activation(y).abs().amax().isfinite() == (gate == 89)


def test_no_tokens_have_no_amax(quantizers: Quantizers) -> None:
    y = torch.zeros(0, 512, dtype=torch.bfloat16)
    x, amax = quantizers.call("swiglu_with_amax", y)
    g, other = quantizers.call("swiglu_with_amax", y, x)
    assert (x.shape, g.shape) == ((0, 256), (0, 512))
    assert amax == other == 0
    assert swiglu.swiglu_with_amax(y)[1] == 0


def test_the_reference_rounds_once() -> None:
    d, y = tensors(64, 128)
    for actual, expected in ((swiglu.swiglu(y), activation(y)), (swiglu.swiglu_gradient(d, y), gradient(d, y))):
        numbers = ~expected.isnan()
        assert torch.equal(actual.isnan(), ~numbers)
        torch.testing.assert_close(actual[numbers], expected[numbers], rtol=2**-7, atol=0)
        assert (actual[numbers] == expected[numbers]).float().mean() > 0.99
