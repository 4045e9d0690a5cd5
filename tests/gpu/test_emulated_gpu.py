"""Formats on bf16 tensor cores of a GPU: bits of the operands, errors of the GEMMs, accumulation, CUDA graphs."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize import operands as reference
from snip_megatron.numerics.quantize.operands import CachedPair, GradientKeys, OperandSpec
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.precision import Format, Gemm

FORMATS = [fmt for fmt in Format if fmt is not Format.BF16]
SHAPES = [(8192, 4096, 4096), (1000, 1040, 4224), (130, 136, 200), (4, 128, 128)]


@pytest.fixture(scope="module")
def backend() -> Iterator[GemmBackend]:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs bf16 tensor cores (sm_80 or later)")
    yield select_backend("emulated").backend
    torch.cuda.empty_cache()


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(m + n + k)
    x, w, g = (torch.randn(shape, device="cuda", generator=generator) for shape in ((m, k), (n, k), (m, n)))
    spread = torch.rand(m, 1, device="cuda", generator=generator).exp()
    return (x * spread).bfloat16(), (w * k**-0.5).bfloat16(), (g * spread * 1e-3).bfloat16()


def hard_matrix(seed: int, rows: int = 256, cols: int = 512) -> Tensor:
    """Bf16 numbers of all bit patterns in some rows; in the others, tiles of all sizes with few mantissas, which make
    ties of all kinds.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=generator)

    unit = torch.ones((), device="cuda")
    x = integers(-255, 256, rows, cols) * torch.ldexp(unit, integers(-8, 1, rows, cols))
    x = (x * torch.ldexp(unit, integers(-20, 1, rows, 1)) * (1 + seed / 128)).bfloat16()
    x[: rows // 4] = integers(-(1 << 15), 1 << 15, rows // 4, cols).to(torch.int16).view(torch.bfloat16)
    x[rows // 4 : rows // 2, ::16] = 0.0
    x[rows // 2 : rows // 2 + 16] = -0.0
    return x


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bits_of_hard_matrices(fmt: Format) -> None:
    """The amax is that of the finite tiles, or one that is passed and makes many scales."""
    from snip_megatron.numerics.quantize.kernels.exact import quantize_exact

    for seed in range(0, 128, 4):
        x = hard_matrix(seed)
        amax = x[64:].abs().amax().float() if seed % 8 else None
        if amax is not None:
            x[:64] = x[64:128]
        spec = OperandSpec(fmt, fmt, amax=amax, rotation=Rotation(seed, amax))
        actual, expected = quantize_exact(x, spec), reference.quantize_exact(x, spec)
        for side, result, truth in zip(("row", "col"), actual, expected, strict=True):
            numbers = ~truth.dequantize().isnan()
            assert torch.equal(~result.dequantize().isnan(), numbers), (side, seed)
            same = result.values.view(torch.int16) == truth.values.view(torch.int16)
            assert same[numbers].all(), (side, seed, int((~same & numbers).sum()))
            torch.testing.assert_close(result.scale, truth.scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemms_add_nothing_to_what_quantisation_did(
    backend: GemmBackend, shape: tuple[int, int, int], fmt: Format
) -> None:
    x, w, g = operands(*shape)
    n, k = w.shape
    x_row, x_col = backend.quantize(x, OperandSpec(fmt, fmt))
    w_row, w_col = backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
    g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=GradientKeys(5, 6, torch.arange(n, device="cuda"))))
    exact_w, exact_g = g_col.dequantize().double().t() @ x_col.dequantize().double(), g_row.dequantize().double()
    products = (
        (
            backend.multiply(Gemm.FPROP, x_row, w_row, torch.float32),
            x_row.dequantize().double() @ w_row.dequantize().double().t(),
        ),
        (backend.multiply(Gemm.DGRAD, g_row, w_col, torch.float32), exact_g @ w_col.dequantize().double()),
        (backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32), exact_w),
        (backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32, torch.zeros(n, k, device="cuda")), exact_w),
    )
    for index, (actual, expected) in enumerate(products):
        assert float((actual.double() - expected).norm() / expected.norm()) < 1e-6, index


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_captured_products_follow_keys_and_weights(backend: GemmBackend, fmt: Format) -> None:
    """A replay reads new tensors, new keys and a renewed weight at the addresses that it was captured with."""
    m, n, k = 256, 384, 512
    x, w, g = operands(m, n, k)
    words = torch.tensor([[1, 2, 0, 0], [3, 4, 0, 0]], dtype=torch.int32, device="cuda")
    current = torch.zeros(4, dtype=torch.int32, device="cuda")[:1]
    sides = backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
    cached = CachedPair(sides, current)
    cols = torch.arange(n, device="cuda")
    out = torch.zeros(n, k, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        x_row, x_col = backend.quantize(x, OperandSpec(fmt, fmt))
        w_row, w_col = backend.quantize(w, OperandSpec(fmt, fmt, weight=True), cached)
        g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=GradientKeys(words[0, :2], words[1, :2], cols)))
        backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32, out.zero_())
        return backend.multiply(Gemm.FPROP, x_row, w_row, torch.bfloat16), backend.multiply(
            Gemm.DGRAD, g_row, w_col, torch.bfloat16
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, d = step()
    other = operands(m, n, k + 8)
    for mine, new in ((x, other[0][:, :k]), (w, other[1][:, :k]), (g, other[2])):
        mine.copy_(new)
    words += 10
    graph.replay()
    replayed = y.clone(), d.clone(), out.clone()
    expected = *step(), out.clone()
    for actual, truth in zip(replayed, expected, strict=True):
        assert torch.equal(actual, truth)
    current.fill_(1)
    w.zero_()
    graph.replay()
    assert torch.equal(y, replayed[0])  # the kept weight stays
