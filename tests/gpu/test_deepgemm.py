"""DeepGEMM on a Hopper GPU: cuBLASLt's bits in fprop and dgrad, and products inside a CUDA graph."""

from functools import partial

import pytest
import torch

from snip_megatron.numerics.products.cublaslt import cublaslt
from snip_megatron.numerics.products.deepgemm import deepgemm, why_not
from snip_megatron.numerics.products.hopper import HopperBackend
from snip_megatron.numerics.quantize.kernels import quantize
from snip_megatron.numerics.quantize.kernels.quantize import quantize_operands
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format, Gemm

pytestmark = [
    pytest.mark.usefixtures("hopper"),
    pytest.mark.skipif(why_not() is not None, reason=f"DeepGEMM {why_not()}"),
]


def matrix(rows: int, cols: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, cols, device="cuda", generator=generator).bfloat16()


def test_a_product_is_captured_and_replayed() -> None:
    a, other = (quantize_operands(matrix(1024, 2048, seed), OperandSpec(Format.FP8, None))[0] for seed in (0, 3))
    b = quantize_operands(matrix(512, 2048, 1), OperandSpec(Format.FP8, None, weight=True))[0]
    library = cublaslt()
    backend = HopperBackend(quantize, library=library, faster=deepgemm(library)[0])
    multiply = partial(backend.multiply, Gemm.FPROP)
    expected = multiply(other, b, torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = multiply(a, b, torch.bfloat16)
    a.values.copy_(other.values)
    a.scale.copy_(other.scale)
    graph.replay()
    assert torch.equal(found, expected)
