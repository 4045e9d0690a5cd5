"""SwiGLU fused with quantisation, against Megatron's functions as torch compiles them and quantisation after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from snip_megatron.gemm.backend import GemmBackend, Sides
from snip_megatron.gemm.operands import GradientKeys, disassemble
from snip_megatron.gemm.selection import select_backend
from snip_megatron.layers.swiglu_check import difference
from snip_megatron.precision import Format

FP8, FP4 = Format.FP8, Format.FP4
SHAPES = [(4096, 14336), (1000, 5632), (4, 128)]


@pytest.fixture(scope="module")
def backend() -> Iterator[GemmBackend]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (sm_90)")
    yield select_backend("hopper").backend
    torch.compiler.reset()


def tensors(tokens: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    spread = torch.randn(tokens, 1, device="cuda", generator=generator).exp()
    y = torch.randn(tokens, 2 * features, device="cuda", generator=generator) * 2 * spread
    d = torch.randn(tokens, features, device="cuda", generator=generator) * 1e-3 * spread
    return d.bfloat16(), y.bfloat16()


def assert_same(found: Sides, expected: Sides) -> None:
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(disassemble(one)[0], disassemble(other)[0], strict=True):
            assert torch.equal(a.float(), b.float())


def test_functions_are_megatron_s_for_every_gate(backend: GemmBackend) -> None:
    from snip_megatron.megatron.fused_mlp import STOCK

    assert difference(backend, STOCK, torch.device("cuda", torch.cuda.current_device())) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("formats", [(FP8, FP8), (FP4, FP4), (FP8, FP4), (FP4, FP8)])
def test_operands_are_those_of_the_unfused_sequence(
    backend: GemmBackend, formats: tuple[Format, Format], shape: tuple[int, int]
) -> None:
    from snip_megatron.megatron.fused_mlp import STOCK

    d, y = tensors(*shape)
    torch.compiler.reset()
    assert_same(backend.quantize_swiglu(y, *formats), backend.quantize_input(STOCK.forward(y), *formats))
    keys = GradientKeys(2**63 + 5, 6, torch.arange(y.shape[1], device="cuda") + 2 * shape[1])
    expected = backend.quantize_gradient(STOCK.backward(d, y), *formats, keys)
    assert_same(backend.quantize_swiglu_gradient(d, y, *formats, keys), expected)
