"""The kernels of RMSNorm, interpreted on a CPU: the bits of the reference."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from snip_megatron.quantization import packed, rmsnorm
from snip_megatron.quantization.kernels import rmsnorm as kernels
from snip_megatron.quantization.rmsnorm import Order, RMSNorm

from .interpreter import Quantizers
from .test_quantize import assert_same

ONE_WARP, FOUR_WARPS, SQUARES = Order(8, 1, True, rows=4), Order(8, 4, True, rows=4), Order(4, 4, False)
NORMS = [(RMSNorm(ONE_WARP, 1e-5), 768), (RMSNorm(FOUR_WARPS, 1e-6), 4096), (RMSNorm(SQUARES, 1e-5), 1024)]
FORMATS = [("fp8", "fp8"), ("fp8", "fp4"), ("fp4", "fp8"), ("fp4", None), (None, "fp8")]


@pytest.fixture(scope="module")
def quantizers(interpreter: ProcessPoolExecutor) -> Quantizers:
    running = Quantizers(interpreter)
    if running.on_gpu:
        pytest.skip("tests/gpu/test_rmsnorm.py compares the kernels with other libraries' norms")
    return running


def tensors(rows: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, features] and a weight in bf16, with rows of very different size and mean, zeros and NaN."""
    generator = torch.Generator().manual_seed(rows + features)
    x = torch.randn(rows, features, generator=generator) + torch.randn(rows, 1, generator=generator)
    x = x * torch.randn(rows, 1, generator=generator).mul(4).exp()
    x[0], x[1, 3] = 0.0, float("nan")
    return x.to(torch.bfloat16), torch.randn(features, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(("norm", "features"), NORMS)
@pytest.mark.parametrize("rows", [4, 36])
def test_reciprocal_rms(quantizers: Quantizers, norm: RMSNorm, features: int, rows: int) -> None:
    x, _ = tensors(rows, features)
    found, expected = quantizers.call("reciprocal_rms", x, norm), rmsnorm.reciprocal_rms(x, norm)
    assert found.dtype is torch.float32
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_reciprocal_rms_of_an_odd_number_of_rows(quantizers: Quantizers) -> None:
    norm = RMSNorm(Order(8, 1, True), 1e-5)
    x, _ = tensors(7, 512)
    found, expected = quantizers.call("reciprocal_rms", x, norm), rmsnorm.reciprocal_rms(x, norm)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
def test_rmsnorm(quantizers: Quantizers, formats: tuple[str | None, str | None], zero_centred: bool) -> None:
    x, gamma = tensors(200, 256)
    norm = RMSNorm(ONE_WARP, 1e-5, zero_centred)
    rs = rmsnorm.reciprocal_rms(x, norm)
    expected = packed.quantize_tiles(rmsnorm.rmsnorm(x, gamma, rs, norm), *formats)
    found = quantizers.call("quantize_rmsnorm", x, gamma, rs, norm, *formats)
    assert_same(found.row, expected.row)
    assert_same(found.col, expected.col)


def test_no_tokens(quantizers: Quantizers) -> None:
    x, gamma, norm = torch.zeros(0, 512, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16), NORMS[0][0]
    rs = quantizers.call("reciprocal_rms", x, norm)
    found, expected = (
        quantizers.call("quantize_rmsnorm", x, gamma, rs, norm, "fp8", "fp4"),
        packed.quantize_tiles(x, "fp8", "fp4"),
    )
    assert rs.shape == (0,)
    assert_same(found.row, expected.row)
    assert_same(found.col, expected.col)


BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("x", "gamma", "fits"),
    [
        (torch.zeros(4, 512, **BF16), torch.zeros(512, **BF16), True),
        (torch.zeros(4, 512, **BF16), torch.zeros(512), False),
        (torch.zeros(4, 512), torch.zeros(512), False),
        (torch.zeros(6, 512, **BF16), torch.zeros(512, **BF16), False),
        (torch.zeros(4, 640, **BF16), torch.zeros(640, **BF16), False),
        (torch.zeros(4, 1024, **BF16)[:, :512], torch.zeros(512, **BF16), False),
        (torch.zeros(4 * 512 + 2, **BF16)[2:].view(4, 512), torch.zeros(512, **BF16), False),
    ],
)
def test_which_matrices_the_kernels_take(x: torch.Tensor, gamma: torch.Tensor, fits: bool) -> None:
    assert kernels.fits(x, gamma, RMSNorm(ONE_WARP, 1e-5)) is fits
