"""NVFP4 and MXFP8 linears on a Blackwell GPU through Transformer Engine: numbers, accumulation, stochastic rounding.

No such GPU was at hand when this was written: these tests have never run. products/test_blackwell*.py have.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle, LinearState, StepContext
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.blackwell_support import availability
from snip_megatron.numerics.products.check import LEAST_DECIBEL, decibel
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Gemm, LinearId

BF16, NVFP4, MXFP8 = Format.BF16, Format.NVFP4, Format.MXFP8
UNIFORM = [(NVFP4,) * 3, (MXFP8,) * 3]
MIXED = [(NVFP4, MXFP8, MXFP8), (MXFP8, NVFP4, BF16), (BF16, MXFP8, NVFP4)]
SHAPES = [(8192, 4096, 4096), (1000, 1040, 4224), (130, 144, 208), (7, 136, 200), (32, 32, 32)]
LEAST = {NVFP4: LEAST_DECIBEL[4], MXFP8: LEAST_DECIBEL[8], BF16: 45.0}


@pytest.fixture(scope="module")
def backend() -> GemmBackend:
    missing = availability()
    if missing is not None:
        pytest.skip(missing)
    return select_backend("blackwell").backend


def operands(tokens: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(tokens + n)
    x, w, g = (torch.randn(s, device="cuda", generator=generator) for s in ((tokens, k), (n, k), (tokens, n)))
    return x.bfloat16(), w.mul_(k**-0.5).bfloat16(), g.mul_(1e-3).bfloat16()


def keys(n: int, seed: int = 5) -> GradientKeys:
    return GradientKeys(2**63 + seed, 2**40 + seed, torch.arange(n, device="cuda"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("formats", UNIFORM + MIXED, ids=lambda formats: "-".join(formats))
def test_a_linear(backend: GemmBackend, formats: Any, shape: tuple[int, int, int]) -> None:
    """Y, ∂L/∂X and main_grad over two microbatches against FP32 products."""
    _, n, k = shape
    x, w, g = operands(*shape)
    module = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    module.weight.data.copy_(w)
    module.weight.main_grad = torch.ones(n, k, device="cuda")
    module.weight.grad_added_to_main_grad = False
    handle = LinearHandle(
        id=LinearId("decoder", 0, "mlp.linear_fc2"), parallel="row", n=n, k=k, stage=0, tp_rank=0, tp_size=1,
        out_features=torch.arange(n), in_features=torch.arange(k), context=StepContext(backend=backend, seed=3),
        module=module, state=LinearState(formats=formats),
    )  # fmt: skip
    call = LinearCall(handle)
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        y = QuantizedLinear.apply(leaf, module.weight, None, call)
        y.backward(g)
    assert decibel(x.float() @ w.float().t(), y) > LEAST[formats[0]]
    assert decibel(g.float() @ w.float(), leaf.grad) > LEAST[formats[1]]
    assert decibel(2 * (g.float().t() @ x.float()), module.weight.main_grad - 1) > LEAST[formats[2]]


@pytest.mark.parametrize("fmt", [NVFP4, MXFP8])
def test_no_tokens(backend: GemmBackend, fmt: Format) -> None:
    x, w, g = operands(0, 256, 128)
    x_row, x_col = backend.quantize(x, OperandSpec(fmt, fmt))
    w_row, w_col = backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
    g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=keys(256)))
    assert backend.multiply(Gemm.FPROP, x_row, w_row, torch.bfloat16).shape == (0, 256)
    assert backend.multiply(Gemm.DGRAD, g_row, w_col, torch.bfloat16).shape == (0, 128)
    assert not backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32).any()


def test_draws_depend_on_the_keys_and_leave_the_generator_alone(backend: GemmBackend) -> None:
    _, w, g = operands(512, 1024, 256)
    _, w_col = backend.quantize(w, OperandSpec(None, NVFP4, weight=True))
    state = torch.cuda.get_rng_state()

    def product(seed: int) -> Tensor:
        side, _ = backend.quantize(g, OperandSpec(NVFP4, None, keys=keys(1024, seed)))
        return backend.multiply(Gemm.DGRAD, side, w_col, torch.float32)

    first = product(5)
    assert torch.equal(first, product(5))
    assert not torch.equal(first, product(6))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    mean = torch.stack([product(seed) for seed in range(64)]).mean(0)
    exact = g.float() @ w.float()
    assert decibel(exact, mean) > decibel(exact, first) + 3  # what is left is the rounding of W


def test_shards_scale_by_the_amax_of_the_whole(backend: GemmBackend) -> None:
    missing = availability({NVFP4}, sharded=True)
    if missing is not None:
        pytest.skip(missing)
    x, w, _ = operands(256, 128, 512)
    x[0, -1] = 30.0
    w_row, _ = backend.quantize(w[:, :256].contiguous(), OperandSpec(NVFP4, None, weight=True))
    whole = x.clone()
    whole[:, 256:-1] = 0.0
    padded = torch.zeros(128, 512, device="cuda", dtype=torch.bfloat16)
    padded[:, :256] = w[:, :256]
    padded_row, _ = backend.quantize(padded, OperandSpec(NVFP4, None, weight=True))
    row, _ = backend.quantize(whole, OperandSpec(NVFP4, None))
    expected = backend.multiply(Gemm.FPROP, row, padded_row, torch.float32)
    half, _ = backend.quantize(x[:, :256].contiguous(), OperandSpec(NVFP4, None, amax=x.float().abs().amax()))
    torch.testing.assert_close(backend.multiply(Gemm.FPROP, half, w_row, torch.float32), expected, rtol=1e-5, atol=1e-5)
