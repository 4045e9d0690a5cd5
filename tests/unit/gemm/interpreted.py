"""Runs in a process of its own, where Triton's interpreter was chosen before the first import of triton."""

import torch


def differences(shape: tuple[int, int, int], formats: tuple[str, str, str]) -> list[str]:
    """Which of Y, ∂L/∂X, ∇W differ by a bit between Triton's quantisers and torch's."""
    from snip_megatron.gemm.hopper import HopperBackend
    from snip_megatron.gemm.scaled import ScaledProducts
    from snip_megatron.precision import Format
    from snip_megatron.quantization import packed
    from snip_megatron.quantization.kernels import quantize as triton_quantize

    from .emulated_scaled_mm import scaled_mm
    from .products import operands, run

    chosen = tuple(Format(name) for name in formats)
    x, w, g = operands(*shape)
    kernels = run(HopperBackend(triton_quantize, ScaledProducts(scaled_mm)), x, w, g, chosen)
    torch_only = run(HopperBackend(packed, ScaledProducts(scaled_mm)), x, w, g, chosen)
    named = zip(("Y", "dX", "dW"), kernels, torch_only, strict=True)
    return [name for name, found, expected in named if not torch.equal(found, expected)]


def shard_differences(shape: tuple[int, int, int], formats: tuple[str, str, str]) -> list[str]:
    """Which of Y, ∂L/∂X, ∇W differ by a bit between shards of tokens and the whole, by Triton's quantisers."""
    from snip_megatron.gemm.hopper import HopperBackend
    from snip_megatron.gemm.scaled import ScaledProducts
    from snip_megatron.precision import Format
    from snip_megatron.quantization.kernels import quantize as triton_quantize

    from .emulated_scaled_mm import scaled_mm
    from .test_shards import differing

    chosen = tuple(Format(name) for name in formats)
    return differing(HopperBackend(triton_quantize, ScaledProducts(scaled_mm)), chosen, shape)
