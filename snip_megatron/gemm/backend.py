"""What a linear asks of its GEMMs, and which backend answers.

Operands are 2-D: X [T, K], W [N, K], G [T, N]. Formats and their granularity: METHOD, "Formats".
"""

from __future__ import annotations

from typing import Protocol

import torch

from snip_megatron.errors import SnipError
from snip_megatron.gemm import reference
from snip_megatron.precision import Format


class GemmBackend(Protocol):
    """The three GEMMs of a linear. ``seed`` and ``cols`` (global indices of G's columns) key stochastic rounding."""

    name: str

    def fprop(self, x: torch.Tensor, w: torch.Tensor, fmt: Format) -> torch.Tensor:
        """Y = Q(X)·Q(W)ᵀ [T, N] in X's dtype."""

    def dgrad(self, g: torch.Tensor, w: torch.Tensor, fmt: Format, *, seed: int, cols: torch.Tensor) -> torch.Tensor:
        """∂L/∂X = Q(G)·Q(W) [T, K] in G's dtype."""

    def wgrad(
        self,
        g: torch.Tensor,
        x: torch.Tensor,
        fmt: Format,
        *,
        out: torch.Tensor | None,
        seed: int,
        cols: torch.Tensor,
    ) -> torch.Tensor:
        """∇W = Q(G)ᵀ·Q(X) [N, K] in FP32, added to ``out`` when given."""


class ReferenceBackend:
    """Dequantised operands through torch's own GEMM: any device, any shape; for tests, demos and older GPUs."""

    name = "reference"

    def fprop(self, x: torch.Tensor, w: torch.Tensor, fmt: Format) -> torch.Tensor:
        """See :class:`GemmBackend`."""
        return reference.fprop(x, w, fmt)

    def dgrad(self, g: torch.Tensor, w: torch.Tensor, fmt: Format, *, seed: int, cols: torch.Tensor) -> torch.Tensor:
        """See :class:`GemmBackend`."""
        return reference.dgrad(g, w, fmt, seed=seed, cols=cols)

    def wgrad(
        self,
        g: torch.Tensor,
        x: torch.Tensor,
        fmt: Format,
        *,
        out: torch.Tensor | None,
        seed: int,
        cols: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`GemmBackend`."""
        return reference.wgrad(g, x, fmt, out=out, seed=seed, cols=cols)


REFERENCE = ReferenceBackend()


BACKENDS: dict[str, GemmBackend] = {"reference": REFERENCE}


def select_backend(name: str) -> GemmBackend:
    """The backend of ``--snip-gemm``. ``auto`` is the best that this machine can run.

    Raises:
        SnipError: an unknown name.
    """
    if name == "auto":
        return REFERENCE
    if name not in BACKENDS:
        raise SnipError(f"--snip-gemm {name}: unknown; choose one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]
