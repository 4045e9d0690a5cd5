"""Compares the fused SwiGLU with the functions that it replaces, on the device at hand, before a training uses it.

Which instructions a compiler chooses for an exponential or a division depends on its version and settings, and a
difference in the last bit of FP32 rarely shows after rounding to bf16. So the comparison seeks it: it takes every bf16
gate, and beside it the numbers for which the result comes closest to a tie of that rounding. Each result lies alone in
its tiles, whose FP32 scales show all of its bits. The functions that return bf16 and its amax are compared as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from snip_megatron.gemm.backend import GemmBackend, Sides
from snip_megatron.gemm.operands import GradientKeys, disassemble
from snip_megatron.layers.swiglu import SwiGLU
from snip_megatron.precision import Format
from snip_megatron.quantization.formats import TILE

_GATES, _MANTISSAS = 2**16, 2**7  # of bf16
_BLOCKS_DOWN, _BLOCKS_ACROSS = 32, 16  # of 128×128, with 128 gates on the diagonal of each


@functools.cache
def difference(backend: GemmBackend, stock: SwiGLU, device: torch.device, repeats: int = 4) -> str | None:
    """Return what differs in a bit between the fused functions and ``stock``; None if nothing does.

    Args:
        backend: the backend, which has kernels for fp8.
        stock: the functions that the fused ones replace.
        device: where to compare.
        repeats: numbers that are tried beside each gate.
    """
    gates = torch.arange(_GATES, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    both = (Format.FP8, Format.FP8)
    for d, ups in _beside(gates, repeats):
        y = torch.cat((_alone(gates), _alone(ups)), 1)
        if not backend.quantizes_swiglu(y, both):
            return f"the {backend.name} GEMMs have no kernel for it"
        x = stock.forward(y)
        if not _same(backend.quantize_swiglu(y, *both), backend.quantize_input(x, *both)):
            return "SwiGLU"
        d, keys = _alone(d), GradientKeys(None, None, torch.arange(y.shape[1], device=device))
        g = stock.backward(d, y)
        if not _same(backend.quantize_swiglu_gradient(d, y, *both, keys), backend.quantize_gradient(g, *both, keys)):
            return "the gradient of SwiGLU"
        if backend.finds_amax_of_swiglu(y, (Format.FP8_TENSOR,) * 2):
            if not _same_with_amax(backend.swiglu_with_amax, x, y):
                return "SwiGLU with its amax"
            if not _same_with_amax(backend.swiglu_gradient_with_amax, g, d, y):
                return "the gradient of SwiGLU with its amax"
    return None


def _beside(gates: Tensor, repeats: int) -> list[tuple[Tensor, Tensor]]:
    """Return (gradients of the result, ups) [65536] beside the gates, both bf16.

    SwiGLU and its derivatives are products with one of them, so that scaling by a mantissa reaches the ties. The ups of
    odd repeats are chosen for the gradient of the gate, the others for the result.
    """
    gate = gates.double()
    sigmoid = torch.sigmoid(gate)
    silu, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    of_silu = _near_ties(silu, repeats)
    found = []
    for repeat in range(repeats):
        d = of_silu[:, repeat]
        up = _near_ties(d * slope, repeats)[:, repeat] if repeat % 2 else of_silu[:, repeat]
        found.append((d.to(torch.bfloat16), up.to(torch.bfloat16)))
    return found


def _near_ties(factor: Tensor, number: int) -> Tensor:
    """Return the mantissas in [1, 2), float64 [n, number], whose products with ``factor`` [n] are closest to ties."""
    mantissas = 1 + torch.arange(_MANTISSAS, dtype=torch.float64, device=factor.device) / _MANTISSAS
    fraction, _ = torch.frexp(factor[:, None].abs() * mantissas)
    steps = fraction * (2 * _MANTISSAS)  # of bf16: a tie lies half a step above a number
    distance = (steps - steps.floor() - 0.5).abs().nan_to_num(1.0)
    return mantissas[distance.topk(number, largest=False).indices]


def _alone(values: Tensor) -> Tensor:
    """Return a matrix in which each of ``values`` [65536] is the only number of its row tile and of its column tile."""
    blocks = torch.diag_embed(values.view(_BLOCKS_DOWN, _BLOCKS_ACROSS, TILE))
    return blocks.permute(0, 2, 1, 3).reshape(_BLOCKS_DOWN * TILE, _BLOCKS_ACROSS * TILE)


def _same_with_amax(function: Callable[..., tuple[Tensor, Tensor]], expected: Tensor, *arguments: Tensor) -> bool:
    """Compare results and amaxes of 128 rows at a time, of which most hold numbers alone, neither NaN nor Inf."""
    pieces = zip(*(torch.split(argument, TILE) for argument in arguments), strict=True)
    return all(
        _equal(x, piece) and _equal(amax, piece.abs().amax())
        for piece, (x, amax) in zip(torch.split(expected, TILE), itertools.starmap(function, pieces), strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.float().nan_to_num(), b.float().nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def _same(fused: Sides, unfused: Sides) -> bool:
    return all(
        _equal(a, b)
        for found, expected in zip(fused, unfused, strict=True)
        for a, b in zip(disassemble(found)[0], disassemble(expected)[0], strict=True)
    )
