"""RMSNorm fused with quantisation, against the norms of torch and of Transformer Engine and quantisation after them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from snip_megatron.gemm.backend import GemmBackend, Sides
from snip_megatron.gemm.operands import disassemble
from snip_megatron.gemm.selection import select_backend
from snip_megatron.layers.rmsnorm_check import difference
from snip_megatron.megatron.compat.norms import TRANSFORMER_ENGINE, stock_norm
from snip_megatron.precision import Format
from snip_megatron.quantization.rmsnorm import Order

FP8, FP4 = Format.FP8, Format.FP4
KINDS = ["torch", "transformer_engine", "transformer_engine, zero-centred"]
FEATURES = (2048, 4096, 8192)


@pytest.fixture(scope="module")
def backend() -> GemmBackend:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (sm_90)")
    return select_backend("hopper").backend


def norm(kind: str, features: int) -> Any:
    """A norm with a weight that is not constant."""
    options: dict[str, Any] = {"eps": 1e-5, "device": "cuda", "dtype": torch.bfloat16}
    if kind == "torch":
        made: Any = torch.nn.RMSNorm(features, **options)
    else:
        library = pytest.importorskip("transformer_engine.pytorch")
        made = library.RMSNorm(features, zero_centered_gamma="zero" in kind, **options)
    made.weight.data += torch.randn(features, device="cuda").bfloat16() * 0.3
    return made


def matrix(tokens: int, features: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    spread = torch.randn(tokens, 1, device="cuda", generator=generator).exp()
    return (torch.randn(tokens, features, device="cuda", generator=generator) * spread).bfloat16()


def assert_same(found: Sides, expected: Sides) -> None:
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        for a, b in zip(disassemble(one)[0], disassemble(other)[0], strict=True):
            assert torch.equal(a.float(), b.float())


def compared(backend: GemmBackend, module: Any, stock: Any) -> str | None:
    device = torch.device("cuda", torch.cuda.current_device())
    return difference(backend, module, stock, device, torch.bfloat16, rows=16384)


@pytest.mark.parametrize("features", [*TRANSFORMER_ENGINE, 1536, 5120])
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_differs_from_the_norm(backend: GemmBackend, kind: str, features: int) -> None:
    module = norm(kind, features)
    if kind == "torch" and features % 512:
        pytest.skip("torch's threads have other numbers of elements")
    if kind != "torch" and features not in TRANSFORMER_ENGINE:
        with pytest.raises(LookupError, match="order of additions"):
            stock_norm(module)
        return
    assert compared(backend, module, stock_norm(module)) is None


@pytest.mark.parametrize("kind", KINDS[:2])
def test_another_order_is_noticed(backend: GemmBackend, kind: str) -> None:
    module = norm(kind, 4096)
    stock = stock_norm(module)
    for order in (Order(8, 1, True), Order(4, 4, True), Order(8, 4, False), Order(4, 1, False)):
        other = dataclasses.replace(stock, norm=dataclasses.replace(stock.norm, order=order))
        found = compared(backend, module, other)
        assert found is not None
        assert found.startswith("the reciprocal RMS")


@pytest.mark.parametrize("tokens", [8192, 1000, 4])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("formats", [(FP8, FP8), (FP4, FP4), (FP8, FP4), (FP4, FP8), (FP8, None)])
@pytest.mark.parametrize("kind", KINDS)
def test_operands_are_those_of_the_unfused_sequence(
    backend: GemmBackend, kind: str, formats: tuple[Format, Format | None], features: int, tokens: int
) -> None:
    module, x = norm(kind, features), matrix(tokens, features)
    rule, gamma = stock_norm(module).norm, module.weight.detach()
    assert backend.quantizes_rmsnorm(x, gamma, rule, formats)
    with torch.no_grad():
        expected = backend.quantize_input(module(x), *formats)
    found = backend.quantize_rmsnorm(x, gamma, backend.reciprocal_rms(x, rule), rule, *formats)
    assert_same(found, expected)
