"""Grouped products on Hopper, with DeepGEMM emulated, against the loop over experts of the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import REFERENCE, assemble, flatten
from snip_megatron.numerics.products.grouped import DeviceRows, GroupLoop, group_rows
from snip_megatron.numerics.products.grouped_hopper import HopperGroups, stacked
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Gemm

from . import emulated_grouped
from .products import hopper

BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR
N, K = 256, 384
SPLITS = [(256, 0, 128), (128,), (0, 0), (128, *[0, 128] * 16)]


def run(products: GroupLoop, splits: tuple[int, ...], formats: Any, out: list[Tensor] | None) -> list[Tensor]:
    """Y, ∂L/∂X and the stacked ∇W."""
    draws, rows = torch.Generator().manual_seed(len(splits)), sum(splits)
    x, g = (torch.randn(rows, width, generator=draws).bfloat16() for width in (K, N))
    weights = [torch.randn(N, K, generator=draws).bfloat16() for _ in splits]
    fprop, dgrad, wgrad = formats
    keys = GradientKeys(17, 18, torch.arange(N) * 2)
    x_row, x_col = products.quantize_rows(x, splits, OperandSpec(fprop, wgrad))
    w_row, w_col = products.quantize_weights(weights, OperandSpec(fprop, dgrad, weight=True))
    g_row, g_col = products.quantize_rows(g, splits, OperandSpec(dgrad, wgrad, keys=keys))
    result = products.accumulate(g_col, assemble(flatten(x_col)), out)
    y, d = products.multiply(Gemm.FPROP, x_row, w_row, x.dtype), products.multiply(Gemm.DGRAD, g_row, w_col, g.dtype)
    return [y, d, torch.stack(list(result))]


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (FP4, FP8, BF16), (BF16, BF16, FP8), (TENSOR, FP8, BF16)])
@pytest.mark.parametrize("library", [emulated_grouped, None], ids=["deepgemm", "torch"])
def test_every_expert_gets_the_products_of_the_reference(splits: tuple[int, ...], formats: Any, library: Any) -> None:
    gradients = torch.randn(len(splits), N, K).bfloat16().float()
    for out in (None, list(gradients.clone().unbind(0)), [each.bfloat16() for each in gradients]):
        products = hopper(groups=library).grouped(N, K, torch.bfloat16)
        assert isinstance(products, HopperGroups)
        result = run(products, splits, formats, out)
        expected = run(REFERENCE.grouped(N, K, torch.bfloat16), splits, formats, list(gradients.clone().unbind(0)))
        if out is None:
            expected[2] -= gradients
        for actual, exact in zip(result, expected, strict=True):
            scale = exact.float().abs().amax().clamp_min(1e-20) if exact.numel() else 1.0
            torch.testing.assert_close(actual.float() / scale, exact.float() / scale, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("fmt", [FP8, FP4])
def test_experts_with_many_rows_have_the_wgrads_of_one_launch(fmt: Format) -> None:
    """Their products are those of cuBLASLt, expert by expert, unless only the device knows their numbers of rows."""
    counts, (n, k) = (9088, 0, 4096), (128, 128)
    x, g = (torch.randn(sum(counts), width).bfloat16() for width in (k, n))
    products, out = hopper(groups=emulated_grouped).grouped(n, k, torch.bfloat16), []
    for rows in (counts, DeviceRows(torch.tensor(counts), sum(counts), backwards=False)):
        of_x, of_g = (products.quantize_rows(each, rows, OperandSpec(None, fmt))[1] for each in (x, g))
        out.append(torch.stack(list(products.accumulate(of_g, of_x, list(torch.ones(3, n, k).unbind(0))))))
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-2)
    assert not torch.equal(*out)  # their sums have another order
    assert (out[0][1] == 1).all()


def test_stochastic_rounding_is_right_on_average() -> None:
    """The draws differ from those of the loop. Their mean over keys is the gradient."""
    products = hopper(groups=emulated_grouped).grouped(N, K, torch.bfloat16)
    g = torch.randn(256, N).bfloat16()
    means = []
    for seed in range(64):
        keys = GradientKeys(2 * seed, 2 * seed + 1, torch.arange(N))
        row, _ = products.quantize_rows(g, (128, 128), OperandSpec(FP4, BF16, keys=keys))
        means.append(row.matrix.dequantize())
    error = torch.stack(means).mean(0) - g.float()
    assert error.norm() / g.float().norm() < 0.03


def test_other_shapes_and_dtypes_run_expert_by_expert() -> None:
    for n, k, dtype in ((N, 200, torch.bfloat16), (200, K, torch.bfloat16), (N, K, torch.float32)):
        assert type(hopper().grouped(n, k, dtype)) is GroupLoop


def test_only_matrices_that_follow_each_other_are_one_tensor() -> None:
    whole = torch.randn(3, 4, 8)
    result = stacked(list(whole.unbind(0)))
    assert result.data_ptr() == whole.data_ptr()
    assert torch.equal(result, whole)
    for matrices in ([whole[1], whole[0]], [whole[0], whole[2]], [whole[0], whole[1].clone()]):
        assert stacked(matrices) is None


def test_rows_in_memory_are_bounded() -> None:
    """The rows of experts differ from step to step."""
    for rows in range(100):
        group_rows((rows, 1), torch.device("cpu"))
    assert group_rows.cache_info().currsize < 100
