"""What a linear asks of its GEMMs.

A linear hands each of its tensors over once: X in its forward for fprop and wgrad, G in its backward for dgrad and
wgrad, W once an optimizer step. A backend that quantises at once does so there, in one read; one that does not (the
reference) returns the tensor itself. Operands are 2-D: X [T, K], W [N, K], G [T, N]. Formats and their granularity:
METHOD, "Formats". The three GEMMs of a linear may have three formats; None stands for a GEMM that will not run.
``amax`` (0-dim FP32) is max|·| of the whole matrix where the operand is a shard: fp8_tensor and nvfp4 scale by it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from snip_megatron.gemm import reference
from snip_megatron.gemm.operands import GradientKeys, Plain, Side
from snip_megatron.precision import Format

Sides = tuple[Any, Any]
"""The operands of the two GEMMs that read a tensor, each a :data:`Side`; None for a GEMM that does not run."""


class GemmBackend(Protocol):
    """Quantisation and the three GEMMs of a linear."""

    name: str

    def quantize_input(
        self, x: Tensor, fprop: Format | None, wgrad: Format | None, *, amax: Tensor | None = None
    ) -> Sides:
        """X [T, K] as fprop (tiles along K) and wgrad (tiles along T) take it."""

    def quantize_weight(
        self, w: Tensor, fprop: Format | None, dgrad: Format | None, *, amax: Tensor | None = None
    ) -> Sides:
        """W [N, K] as fprop (reduction along K) and dgrad (along N) take it."""

    def quantize_gradient(
        self,
        g: Tensor,
        dgrad: Format | None,
        wgrad: Format | None,
        keys: GradientKeys,
        *,
        amax: Tensor | None = None,
    ) -> Sides:
        """G [T, N] as dgrad (tiles along N) and wgrad (tiles along T) take it."""

    def fprop(self, x: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """Y = Q(X)·Q(W)ᵀ [T, N] in ``dtype``."""

    def dgrad(self, g: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """∂L/∂X = Q(G)·Q(W) [T, K] in ``dtype``."""

    def wgrad(self, g: Side, x: Side, *, out: Tensor | None) -> Tensor:
        """∇W = Q(G)ᵀ·Q(X) [N, K] in FP32, added to ``out`` when given."""


class ReferenceBackend:
    """Dequantised operands through torch's own GEMM: any device, any shape; for tests, demos and older GPUs.

    Every GEMM quantises its own operands, and X is saved for the backward as it is.
    """

    name = "reference"

    def quantize_input(
        self, x: Tensor, fprop: Format | None, wgrad: Format | None, *, amax: Tensor | None = None
    ) -> Sides:
        """See :class:`GemmBackend`."""
        return _plain(x, fprop, amax), _plain(x, wgrad, amax)

    def quantize_weight(
        self, w: Tensor, fprop: Format | None, dgrad: Format | None, *, amax: Tensor | None = None
    ) -> Sides:
        """See :class:`GemmBackend`."""
        return _plain(w, fprop, amax), _plain(w, dgrad, amax)

    def quantize_gradient(
        self,
        g: Tensor,
        dgrad: Format | None,
        wgrad: Format | None,
        keys: GradientKeys,
        *,
        amax: Tensor | None = None,
    ) -> Sides:
        """See :class:`GemmBackend`."""
        return _plain(g, dgrad, amax, keys.dgrad, keys.cols), _plain(g, wgrad, amax, keys.wgrad, keys.cols)

    def fprop(self, x: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See :class:`GemmBackend`."""
        assert isinstance(x, Plain)
        assert isinstance(w, Plain)
        return reference.fprop(x.tensor, w.tensor, x.format, amax=(x.amax, w.amax), out_dtype=dtype)

    def dgrad(self, g: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See :class:`GemmBackend`."""
        assert isinstance(g, Plain)
        assert isinstance(w, Plain)
        return reference.dgrad(
            g.tensor, w.tensor, g.format, seed=g.seed, cols=g.cols, amax=(g.amax, w.amax), out_dtype=dtype
        )

    def wgrad(self, g: Side, x: Side, *, out: Tensor | None) -> Tensor:
        """See :class:`GemmBackend`."""
        assert isinstance(g, Plain)
        assert isinstance(x, Plain)
        return reference.wgrad(g.tensor, x.tensor, g.format, seed=g.seed, cols=g.cols, amax=(g.amax, x.amax), out=out)


def _plain(
    tensor: Tensor, fmt: Format | None, amax: Tensor | None, seed: int | None = None, cols: Tensor | None = None
) -> Plain | None:
    return None if fmt is None else Plain(tensor, fmt, seed, cols, amax)


REFERENCE = ReferenceBackend()
