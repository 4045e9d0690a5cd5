"""Compiled quantisation kernels at training sizes; small shapes: tests/unit/quantization/kernels/test_quantize.py."""

from __future__ import annotations

import pytest
import torch

from snip_megatron.quantization import fake_quantize, packed
from snip_megatron.quantization.packed import Operand


def activations(rows: int = 4096, cols: int = 5120) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(rows, cols, device="cuda", generator=generator)
    return (x * torch.randn(rows, 1, device="cuda", generator=generator).exp()).to(torch.bfloat16)


def assert_same(found: Operand, expected: Operand, drawn: float = 0.0) -> None:
    """``drawn``: the share of numbers of which a draw may decide otherwise, where a quotient is rounded otherwise."""
    assert torch.equal(found.scale, expected.scale)
    differing = int((found.values.view(torch.uint8) != expected.values.view(torch.uint8)).sum())
    assert differing <= drawn * found.values.numel()


@pytest.mark.parametrize("seeds", [{}, {"row_seed": 2**63 + 5, "col_seed": 6}])
@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("fp4", "fp4"), ("fp8", "fp4")])
def test_tiles(formats: tuple[str, str], seeds: dict[str, int]) -> None:
    from snip_megatron.quantization.kernels import quantize as triton_quantize

    x = activations()
    found = triton_quantize.quantize_tiles(x, *formats, **seeds)
    expected = packed.quantize_tiles(x, *formats, **seeds)
    assert_same(found.row, expected.row, 1e-5 if seeds else 0.0)
    assert_same(found.col, expected.col, 1e-5 if seeds else 0.0)


def test_blocks_and_tensor() -> None:
    from snip_megatron.quantization.kernels import quantize as triton_quantize

    w = activations(5120, 4096 + 640)
    found, expected = triton_quantize.quantize_blocks(w, "fp8", "fp4"), packed.quantize_blocks(w, "fp8", "fp4")
    assert_same(found.row, expected.row)
    assert_same(found.col, expected.col)
    found, expected = triton_quantize.quantize_tensor(w, col=True), packed.quantize_tensor(w, col=True)
    assert_same(found.row, expected.row)
    assert_same(found.col, expected.col)


def test_a_captured_graph_finds_the_amax_of_what_is_there() -> None:
    """Also where it is smaller than in the replay before, and after a NaN."""
    from snip_megatron.quantization.kernels import quantize as triton_quantize

    x = activations(4096, 5120)
    numbers, spoilt = x.clone(), x.clone()
    spoilt[7, 9] = float("nan")
    triton_quantize.quantize_tensor(x, col=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_quantize.quantize_tensor(x, col=True)
    for source in (numbers, spoilt, numbers / 64, numbers * 4):
        x.copy_(source)
        graph.replay()
        expected = packed.quantize_tensor(source, col=True)
        if source is spoilt:
            assert found.row.scale.isnan().all()
        else:
            assert_same(found.row, expected.row)
            assert_same(found.col, expected.col)


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    from snip_megatron.quantization.kernels import quantize as triton_quantize

    x = activations(1024, 2048)
    draws = [triton_quantize.quantize_tiles(x, "fp4", None, row_seed=s).row.dequantize() for s in range(64)]
    again = triton_quantize.quantize_tiles(x, "fp4", None, row_seed=7).row.dequantize()
    assert torch.equal(again, draws[7])
    assert not torch.equal(again, draws[8])
    scale = x.float().abs().view(1024, -1, 128).amax(-1).repeat_interleave(128, 1)
    error = (torch.stack(draws) - x.float()).double() / scale
    assert abs(error.sum().item()) < 4 * error.square().sum().sqrt().item()


@pytest.mark.parametrize("fmt", ["fp4", "fp8", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8"])
def test_the_reference_gives_the_same_on_the_gpu_as_on_the_cpu(fmt: str) -> None:
    x = activations(300, 700)
    options = {"rounding": "stochastic", "seed": 3}
    assert torch.equal(fake_quantize(x, fmt).cpu(), fake_quantize(x.cpu(), fmt))
    assert torch.equal(fake_quantize(x, fmt, **options).cpu(), fake_quantize(x.cpu(), fmt, **options))
