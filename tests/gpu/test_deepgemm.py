"""DeepGEMM on a Hopper GPU: cuBLASLt's bits in fprop and dgrad, wgrad within 1e-6, and products inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from snip_megatron.gemm.cublaslt import cublaslt
from snip_megatron.gemm.deepgemm import deepgemm, why_not
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format
from snip_megatron.quantization.kernels.quantize import quantize_operands
from snip_megatron.quantization.operands import OperandSpec

SHAPES = [(4096, 4096, 4096), (8192, 6144, 4096), (2048, 11264, 2048), (1000, 1040, 4224), (132, 144, 208)]


@pytest.fixture(scope="module", autouse=True)
def _usable() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (sm_90)")
    if (missing := why_not()) is not None:
        pytest.skip(f"DeepGEMM {missing}")


def products(*, faster: bool) -> ScaledProducts:
    library = cublaslt()
    return ScaledProducts(library=library, faster=deepgemm(library, required=True)[0] if faster else None)


def matrix(rows: int, cols: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, cols, device="cuda", generator=generator).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
def test_wgrad_is_accumulated(shape: tuple[int, int, int]) -> None:
    rows, cols, tokens = shape
    g, x = (
        quantize_operands(matrix(tokens, size, seed), OperandSpec(None, Format.FP8))[1]
        for seed, size in ((0, rows), (1, cols))
    )
    start = matrix(rows, cols, 2).float()
    found, expected = (products(faster=faster).accumulate(g, x, start.clone()) for faster in (True, False))
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_a_product_is_captured_and_replayed() -> None:
    a, other = (quantize_operands(matrix(1024, 2048, seed), OperandSpec(Format.FP8, None))[0] for seed in (0, 3))
    b = quantize_operands(matrix(512, 2048, 1), OperandSpec(Format.FP8, None, weight=True))[0]
    multiply = products(faster=True).multiply
    expected = multiply(other, b, torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = multiply(a, b, torch.bfloat16)
    a.values.copy_(other.values)
    a.scale.copy_(other.scale)
    graph.replay()
    assert torch.equal(found, expected)
