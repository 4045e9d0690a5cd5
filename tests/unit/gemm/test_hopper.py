"""The Hopper backend on a CPU: cuBLAS emulated with its layouts and refusals, quantisers in torch and in Triton.

What a GPU computes is tested in tests/gpu; here, that every operand has the layout that cuBLAS takes, and the numbers.
"""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.gemm.emulated import EmulatedBackend
from snip_megatron.gemm.exact_products import ExactProducts
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import assemble, flatten
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import packed
from snip_megatron.quantization.exact import quantize_exact
from snip_megatron.quantization.operands import GradientKeys, OperandSpec

from .emulated_scaled_mm import scaled_mm
from .interpreted import differences

BF16, FP8, FP4, TENSOR, NVFP4 = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4
UNIFORM = [(fmt, fmt, fmt) for fmt in (FP8, FP4, TENSOR)]
MIXED = [(FP8, FP4, BF16), (BF16, FP8, FP4), (TENSOR, FP8, FP4), (FP4, TENSOR, FP8), (NVFP4, FP4, TENSOR)]
EVEN = (256, 384, 512)  # T, N, K
TAILS = (136, 144, 208)  # whole tiles nowhere, but taken by cuBLAS
REFUSED = [(130, 144, 208), (7, 136, 200), (0, 144, 208), (12, 136, 1), (12, 1, 256)]


def backend() -> HopperBackend:
    return HopperBackend(packed, ScaledProducts(scaled_mm))


def emulated() -> EmulatedBackend:
    return EmulatedBackend(quantize_exact, ExactProducts())


def operands(tokens: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + n + k)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((tokens, k), (n, k), (tokens, n)))
    spread = torch.randn(tokens, 1, generator=generator).exp()
    return (x * spread).to(dtype), w.to(dtype), (g * spread * 1e-3).to(dtype)


def keys(n: int) -> GradientKeys:
    return GradientKeys(2**63 + 17, 18, torch.arange(n) * 2 + 5)


def run(b: GemmBackend, x: Tensor, w: Tensor, g: Tensor, formats: Any, out: Tensor | None = None) -> list[Tensor]:
    """Y, ∂L/∂X and ∇W as a linear gets them."""
    fprop, dgrad, wgrad = formats
    x_row, x_col = b.quantize(x, OperandSpec(fprop, wgrad))
    w_row, w_col = b.quantize(w, OperandSpec(fprop, dgrad, weight=True))
    g_row, g_col = b.quantize(g, OperandSpec(dgrad, wgrad, keys=keys(w.shape[0])))
    tensors, rest = flatten(x_col)
    return [
        b.multiply(Gemm.FPROP, x_row, w_row, x.dtype),
        b.multiply(Gemm.DGRAD, g_row, w_col, g.dtype),
        b.multiply(Gemm.WGRAD, g_col, assemble((tensors, rest)), torch.float32, out),
    ]


def assert_reference(
    b: GemmBackend, shape: tuple[int, int, int], formats: Any, dtype: torch.dtype = torch.bfloat16
) -> None:
    """The reference's numbers up to FP32 summation (and one rounding of Y and ∂L/∂X)."""
    x, w, g = operands(*shape, dtype=dtype)
    for found, expected in zip(run(b, x, w, g, formats), run(REFERENCE, x, w, g, formats), strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        rtol = max(torch.finfo(found.dtype).eps, 1e-5)
        scale = expected.float().abs().amax().clamp_min(1e-20) if expected.numel() else torch.tensor(1.0)
        torch.testing.assert_close(found.float() / scale, expected.float() / scale, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("formats", UNIFORM + MIXED)
@pytest.mark.parametrize("shape", [EVEN, TAILS])
def test_layouts_are_what_cublas_takes_and_numbers_the_reference_s(shape: tuple[int, int, int], formats: Any) -> None:
    assert_reference(backend(), shape, formats)


@pytest.mark.parametrize("formats", UNIFORM[1:])
@pytest.mark.parametrize("shape", REFUSED)
def test_shapes_that_cublas_refuses(shape: tuple[int, int, int], formats: Any) -> None:
    """Rows of A not a multiple of 4 are padded; outputs not a multiple of 16 are multiplied in FP32; T = 0 is empty."""
    assert_reference(backend(), shape, formats)


@pytest.mark.parametrize("make", [backend, emulated], ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("formats", [MIXED[0], MIXED[2]])
def test_other_dtypes(make: Any, dtype: torch.dtype, formats: Any) -> None:
    assert_reference(make(), TAILS, formats, dtype)


@pytest.mark.parametrize("make", [backend, emulated], ids=lambda make: make.__name__)
@pytest.mark.parametrize("fmt", [BF16, FP8, FP4, TENSOR, NVFP4, Format.MXFP8])
@pytest.mark.parametrize("tokens", [136, 0])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8 * 1.001)], ids=str)
def test_wgrad_is_added_to_a_gradient(make: Any, fmt: Format, tokens: int, dtype: torch.dtype, error: float) -> None:
    """In FP32. The sum is rounded once, to the nearest number of the gradient's dtype."""
    x, w, g = operands(tokens, 144, 208)
    main_grad = torch.randn(144, 208).to(dtype)
    before = main_grad.clone()
    *_, alone = run(make(), x, w, g, (fmt, fmt, fmt))
    *_, added = run(make(), x, w, g, (fmt, fmt, fmt), out=main_grad)
    assert added is main_grad
    torch.testing.assert_close(main_grad.float(), before.float() + alone, rtol=error, atol=1e-6)
    assert alone.dtype is torch.float32
    assert bool(alone.any()) == (tokens > 0)


def test_bf16_tensors_are_not_quantised() -> None:
    x, w, g = operands(*EVEN)
    y, d, gw = run(backend(), x, w, g, (BF16, BF16, BF16))
    assert torch.equal(y, x @ w.t())
    assert torch.equal(d, g @ w)
    assert torch.equal(gw, g.float().t() @ x.float())


def test_a_not_a_number_spoils_its_own_tiles_only() -> None:
    x, w, g = operands(*EVEN)
    x[5, 300] = float("nan")
    y, _, gw = run(backend(), x, w, g, (FP8, FP8, FP8))
    assert y[5].isnan().all()
    assert not y[6:].isnan().any()
    assert gw[:, 300].isnan().all()
    assert not gw[:, :300].isnan().any()


# -- the kernels ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(136, 144, 208), (130, 136, 200)])
@pytest.mark.parametrize("formats", [("fp8", "fp8", "fp8"), ("fp8", "fp4", "fp4"), ("fp8_tensor", "fp4", "fp8_tensor")])
def test_triton_s_quantisers_in_the_interpreter(
    interpreter: ProcessPoolExecutor, shape: tuple[int, int, int], formats: tuple[str, str, str]
) -> None:
    assert interpreter.submit(differences, shape, formats).result(timeout=300) == []
