"""Compiled quantisation kernels at training sizes; small shapes: quantize/kernels/test_quantize.py."""

import pytest
import torch

from snip_megatron.numerics.quantize import fake_quantize, operands
from snip_megatron.numerics.quantize.operands import GradientKeys, Operand, OperandPair, OperandSpec
from snip_megatron.precision import Format

FP8, FP4 = Format.FP8, Format.FP4
WHOLE = OperandSpec(Format.FP8_TENSOR, Format.FP8_TENSOR)


def quantize_operands(x: torch.Tensor, spec: OperandSpec) -> OperandPair:
    from snip_megatron.numerics.quantize.kernels import quantize

    return quantize.quantize_operands(x, spec)


def activations(rows: int = 4096, cols: int = 5120) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(rows, cols, device="cuda", generator=generator)
    return (x * torch.randn(rows, 1, device="cuda", generator=generator).exp()).to(torch.bfloat16)


def assert_same(actual: Operand, expected: Operand, drawn: float = 0.0) -> None:
    """``drawn``: the share of numbers of which a draw may decide otherwise, where a quotient is rounded otherwise."""
    assert torch.equal(actual.scale, expected.scale)
    differing = int((actual.values.view(torch.uint8) != expected.values.view(torch.uint8)).sum())
    assert differing <= drawn * actual.values.numel()


def check(x: torch.Tensor, spec: OperandSpec) -> None:
    actual, expected = quantize_operands(x, spec), operands.quantize_operands(x, spec)
    for side, reference in zip(actual, expected, strict=True):
        assert_same(side, reference, 0.0 if spec.keys is None else 1e-5)


@pytest.mark.parametrize("keys", [None, GradientKeys(2**63 + 5, 6, paired=True)])
@pytest.mark.parametrize("formats", [(FP8, FP8), (FP4, FP4), (FP8, FP4)])
def test_tiles(formats: tuple[Format, Format], keys: GradientKeys | None) -> None:
    check(activations(), OperandSpec(*formats, keys=keys))


def test_blocks_and_tensor() -> None:
    w = activations(5120, 4096 + 640)
    check(w, OperandSpec(FP8, FP4, weight=True))
    check(w, WHOLE)


def test_a_captured_graph_finds_the_amax_of_what_is_there() -> None:
    """The amax may be smaller than in the replay before, or follow a NaN."""
    x = activations(4096, 5120)
    numbers, spoilt = x.clone(), x.clone()
    spoilt[7, 9] = float("nan")
    quantize_operands(x, WHOLE)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = quantize_operands(x, WHOLE)
    for source in (numbers, spoilt, numbers / 64, numbers * 4):
        x.copy_(source)
        graph.replay()
        expected = operands.quantize_operands(source, WHOLE)
        if source is spoilt:
            assert actual[0].scale.isnan().all()
        else:
            for side, reference in zip(actual, expected, strict=True):
                assert_same(side, reference)


@pytest.mark.parametrize("fmt", ["fp4", "fp8", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8"])
def test_the_reference_gives_the_same_on_the_gpu_as_on_the_cpu(fmt: str) -> None:
    x = activations(300, 700)
    options = {"rounding": "stochastic", "seed": 3}
    assert torch.equal(fake_quantize(x, fmt).cpu(), fake_quantize(x.cpu(), fmt))
    assert torch.equal(fake_quantize(x, fmt, **options).cpu(), fake_quantize(x.cpu(), fmt, **options))
