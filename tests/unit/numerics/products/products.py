"""The backends on a CPU, with libraries emulated, and the three products of a linear by each of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend, assemble, flatten
from snip_megatron.numerics.products.emulated import EmulatedBackend
from snip_megatron.numerics.products.hopper import HopperBackend
from snip_megatron.numerics.quantize import operands as quantizers_in_torch
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec, quantize_exact
from snip_megatron.precision import Format, Gemm

from .emulated_cublaslt import EmulatedCublasLt

QUANTISED = [fmt for fmt in Format if fmt is not Format.BF16]
EVEN = (256, 384, 512)  # T, N, K


def hopper(quantizers: Any = quantizers_in_torch, **options: Any) -> HopperBackend:
    """The Hopper backend over emulated cuBLASLt."""
    return HopperBackend(quantizers, **{"library": EmulatedCublasLt(), **options})


BACKENDS: dict[str, Callable[[], GemmBackend]] = {
    "reference": lambda: REFERENCE,
    "hopper": hopper,
    "emulated": lambda: EmulatedBackend(quantize_exact),
}


def operands(tokens: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and G."""
    generator = torch.Generator().manual_seed(tokens + n + k)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((tokens, k), (n, k), (tokens, n)))
    spread = torch.randn(tokens, 1, generator=generator).exp()
    return (x * spread).to(dtype), w.to(dtype), (g * spread * 1e-3).to(dtype)


def keys(n: int, seed: int = 17) -> GradientKeys:
    return GradientKeys(2**63 + seed, seed + 1, torch.arange(n) * 2 + 5)


def sides(b: GemmBackend, x: Tensor, w: Tensor, g: Tensor, formats: Any) -> list[Any]:
    """X, W and G as fprop, dgrad and wgrad take them: x_row, x_col, w_row, w_col, g_row, g_col."""
    fprop, dgrad, wgrad = formats
    return [
        *b.quantize(x, OperandSpec(fprop, wgrad)),
        *b.quantize(w, OperandSpec(fprop, dgrad, weight=True)),
        *b.quantize(g, OperandSpec(dgrad, wgrad, keys=keys(w.shape[0]))),
    ]


def run(b: GemmBackend, x: Tensor, w: Tensor, g: Tensor, formats: Any, out: Tensor | None = None) -> list[Tensor]:
    """Y, ∂L/∂X and ∇W as a linear gets them; X as autograd saves it."""
    x_row, x_col, w_row, w_col, g_row, g_col = sides(b, x, w, g, formats)
    tensors, layout = flatten(x_col)
    return [
        b.multiply(Gemm.FPROP, x_row, w_row, x.dtype),
        b.multiply(Gemm.DGRAD, g_row, w_col, g.dtype),
        b.multiply(Gemm.WGRAD, g_col, assemble((tensors, layout)), torch.float32, out),
    ]


def assert_reference(
    b: GemmBackend, shape: tuple[int, int, int], formats: Any, dtype: torch.dtype = torch.bfloat16
) -> None:
    """The reference's numbers up to FP32 summation (and one rounding of Y and ∂L/∂X)."""
    x, w, g = operands(*shape, dtype=dtype)
    for actual, expected in zip(run(b, x, w, g, formats), run(REFERENCE, x, w, g, formats), strict=True):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        rtol = max(torch.finfo(actual.dtype).eps, 1e-5)
        scale = expected.float().abs().amax().clamp_min(1e-20) if expected.numel() else torch.tensor(1.0)
        torch.testing.assert_close(actual.float() / scale, expected.float() / scale, rtol=rtol, atol=1e-6)
