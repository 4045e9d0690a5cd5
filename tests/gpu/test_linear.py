"""A quantised linear on a Hopper GPU: numbers of Y and all gradients, main_grad, stochastic rounding, odd shapes."""

import math

import pytest
import torch
from gpu_linear import Linear
from torch import Tensor

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Formats, Gemm

BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR
SHAPES = [(4096, 4096, 4096), (1000, 1040, 4224), (8192, 512, 1024), (132, 144, 208), (130, 136, 200), (4, 128, 128)]
# Signal to noise in dB for independent normal operands: at least; 1.0 to 1.5 below what the reference gives.
FLOOR = {FP8: 27.5, TENSOR: 27.0, FP4: 13.0, BF16: 50.0}
# Relative error of a GEMM's own arithmetic in FP32: exact products in fp4; fp8 as the tensor core accumulates.
GEMM_ERROR = {FP8: 3e-4, TENSOR: 3e-4, FP4: 5e-7}
FAST_ERROR = 6e-3
pytestmark = pytest.mark.usefixtures("hopper")


@pytest.fixture(scope="module")
def backend() -> GemmBackend:
    return select_backend("auto").backend


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """X that requires gradients and G, rows of different size."""
    generator = torch.Generator(device="cuda").manual_seed(seed + m)
    x, g = (torch.randn(m, size, device="cuda", generator=generator) for size in (k, n))
    spread = torch.rand(m, 1, device="cuda", generator=generator).exp()
    return (x * spread).bfloat16().requires_grad_(), (g * spread * 1e-3).bfloat16()


UNIFORM: list[Formats] = [(FP8,) * 3, (FP4,) * 3, (TENSOR,) * 3]
MIXED: list[Formats] = [(FP8, FP4, BF16), (BF16, TENSOR, FP4), (TENSOR, FP8, FP4)]


@pytest.mark.parametrize(
    ("shape", "formats"),
    [(shape, formats) for shape in SHAPES for formats in UNIFORM] + [(SHAPES[0], formats) for formats in MIXED],
    ids=str,
)
def test_signal_to_noise_of_output_and_gradients(
    backend: GemmBackend, shape: tuple[int, int, int], formats: Formats
) -> None:
    m, n, k = shape
    linear = Linear(backend, n, k, formats)
    x, g = operands(m, n, k)
    y = linear(x)
    y.backward(g)
    w, xd = linear.weight.detach().double(), x.detach().double()
    exact = (xd @ w.t(), g.double() @ w, g.double().t() @ xd)
    assert x.grad is not None
    for fmt, expected, actual in zip(formats, exact, (y.detach(), x.grad, linear.weight.main_grad), strict=True):
        margin = 3.0 if m < 128 else 0.0  # few tokens: a scale a token in wgrad, and little to average over
        assert decibel(expected, actual) > FLOOR[fmt] - margin, fmt


@pytest.mark.parametrize("fmt", [FP8, FP4, TENSOR])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemms_add_nothing_to_what_quantisation_did(
    backend: GemmBackend, shape: tuple[int, int, int], fmt: Format
) -> None:
    m, n, k = shape
    x, g = operands(m, n, k)
    w = torch.randn(n, k, device="cuda").bfloat16()
    keys = GradientKeys(5, 6, torch.arange(n, device="cuda"))
    x_row, x_col = backend.quantize(x.detach(), OperandSpec(fmt, fmt))
    w_row, w_col = backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
    g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=keys))
    products = (
        (x_row, w_row, backend.multiply(Gemm.FPROP, x_row, w_row, torch.float32)),
        (g_row, w_col, backend.multiply(Gemm.DGRAD, g_row, w_col, torch.float32)),
        (g_col, x_col, backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32)),
        (g_col, x_col, backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32, torch.zeros(n, k, device="cuda"))),
    )
    for index, (a, b, result) in enumerate(products):
        exact = a.dequantize().double() @ b.dequantize().double().t()
        bound = FAST_ERROR if fmt is TENSOR and index < 2 else GEMM_ERROR[fmt]
        assert float((result.double() - exact).norm() / exact.norm()) < bound, index


@pytest.mark.parametrize("fmt", [FP8, FP4, TENSOR, BF16])
@pytest.mark.parametrize("offset", [0, 4, 1])
@pytest.mark.parametrize(("dtype", "before"), [(torch.float32, 2.0), (torch.bfloat16, 0.0)], ids=str)
def test_main_grad(backend: GemmBackend, fmt: Format, offset: int, dtype: torch.dtype, before: float) -> None:
    """Two microbatches add up in FP32, wherever DDP's buffer puts the gradient; the other elements stay."""
    m, n, k = 1024, 512, 384
    formats = (FP8, FP8, fmt)
    buffer = torch.full((n * k + 64,), before, device="cuda", dtype=dtype)
    linear = Linear(backend, n, k, formats, main_grad=buffer[offset : offset + n * k].view(n, k))
    exact = torch.zeros(n, k, device="cuda", dtype=torch.float64)
    for seed in range(2):
        x, g = operands(m, n, k, seed)
        linear(x).backward(g)
        exact += g.double().t() @ x.detach().double()
        assert linear.weight.grad_added_to_main_grad
        assert linear.weight.grad.shape == linear.weight.shape
        linear.weight.grad = None
    assert decibel(exact, linear.weight.main_grad - before) > FLOOR[fmt]
    outside = torch.cat([buffer[:offset], buffer[offset + n * k :]])
    assert torch.equal(outside, torch.full_like(outside, before))


def test_stochastic_rounding_of_gradients_is_unbiased(backend: GemmBackend) -> None:
    """The mean over seeds of ∂L/∂X and ∇W in fp4 goes to that with G unquantised."""
    m, n, k, draws = 256, 256, 256, 64
    x, g = operands(m, n, k)
    w = torch.randn(n, k, device="cuda").bfloat16()
    _, x_col = backend.quantize(x.detach(), OperandSpec(None, FP4))
    _, w_col = backend.quantize(w, OperandSpec(None, FP4, weight=True))
    d, gw = [], []
    for seed in range(draws):
        keys = GradientKeys(seed, 1000 + seed, torch.arange(n, device="cuda"))
        g_row, g_col = backend.quantize(g, OperandSpec(FP4, FP4, keys=keys))
        d.append(backend.multiply(Gemm.DGRAD, g_row, w_col, torch.float32).double())
        gw.append(backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32).double())
    expected_d = g.double() @ w_col.dequantize().double().t()
    expected_gw = g.double().t() @ x_col.dequantize().double().t()
    for actual, expected in ((d, expected_d), (gw, expected_gw)):
        error = torch.stack(actual) - expected
        mean, spread = error.mean(0), error.std(0) / draws**0.5
        z = mean / spread
        assert abs(float(z.mean())) < 10 / math.sqrt(z.numel())  # standard errors; elements of a row share draws
        assert 0.9 < float(z.std()) < 1.1


def test_a_delayed_wgrad_is_captured_though_the_weight_has_a_node_of_another_stream(backend: GemmBackend) -> None:
    m, n, k = 512, 256, 384
    linear = Linear(backend, n, k, (FP8, FP8, FP8), delays=True)
    delayed, main_grad = linear.handle.state.delayed, linear.weight.main_grad
    x, g = operands(m, n, k)
    older, stream = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(older):
        node = linear.weight.expand_as(linear.weight).grad_fn
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        linear(x).backward(g)
        delayed.popleft()()
    torch.cuda.synchronize()
    expected = main_grad.clone()
    passes, wgrad = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(passes, stream=stream):
        linear(x).backward(g)
    with torch.cuda.graph(wgrad, stream=stream, pool=passes.pool()):
        delayed.popleft()()
    main_grad.zero_()
    for graph in (passes, wgrad):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(main_grad, expected)
    del node
