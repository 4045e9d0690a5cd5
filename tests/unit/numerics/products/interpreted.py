"""Runs in a process of its own, where Triton's interpreter was chosen before the first import of triton."""

from snip_megatron.numerics.products.hopper import HopperBackend
from snip_megatron.precision import Format

Shape = tuple[int, int, int]
Names = tuple[str, str, str]


def kernels() -> HopperBackend:
    """The Hopper backend with Triton's quantisers, over emulated cuBLAS."""
    from snip_megatron.numerics.quantize.kernels import quantize as triton_quantize

    from .products import hopper

    return hopper(triton_quantize)


def differences(shape: Shape, formats: Names) -> list[str]:
    """Which of Y, ∂L/∂X, ∇W differ by a bit between Triton's quantisers and torch's."""
    from .products import BACKENDS, operands, run

    x, w, g = operands(*shape)
    chosen = tuple(map(Format, formats))
    pairs = zip(*(run(backend, x, w, g, chosen) for backend in (kernels(), BACKENDS["hopper"]())), strict=True)
    return [name for name, (found, expected) in zip(("Y", "dX", "dW"), pairs, strict=True) if not found.equal(expected)]
