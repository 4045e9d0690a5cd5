"""Q: loss divergence and weight divergence combined into one score per option, and prepared for a solver."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.loss_divergence import DGRAD, FloatArray
from snip_megatron.sensitivity.request import BITS, SolveRequest

Q_RULES = ("split", "noise", "paper")
"""Values of ``--snip-q``; the first is the default."""

SIGNIFICANT_DIGITS = 4

BoolArray = NDArray[np.bool_]


def combine(request: SolveRequest, loss: FloatArray, weight: FloatArray, variance: FloatArray) -> FloatArray:
    """Return Q of every option by the rule ``request.q``, float64 [linears, 3, formats].

    - ``split``: ΔL₂ for fprop. For dgrad and wgrad ΔW, scaled so that its sum in the lowest format is
      ``backward_share`` times that of fprop: the ratio of trained loss gaps.
    - ``noise``: ΔL₂ + ``noise_nats`` · variance, in nats.
    - ``paper``: ΔL/ΣΔL + ΔW/ΣΔW. Each sum is over all options in the lowest format.

    Args:
        request: the request.
        loss: ΔL₂ in nats.
        weight: ΔW.
        variance: gradient variance added, relative to the gradient's own.

    Raises:
        SnipError: the rule is unknown.
    """
    if request.q == "split":
        return _split(request, loss, weight)
    if request.q == "noise":
        return loss + request.noise_nats * variance
    if request.q == "paper":
        return _normalised(request, loss) + _normalised(request, weight)
    raise SnipError(f"{request.prefix}q {cut(request.q)}: unknown; choose one of {', '.join(Q_RULES)}")


def _split(request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    backward = weight.copy()
    backward[:, :DGRAD] = 0.0
    forward_sum, backward_sum = (float(in_lowest(request, values).sum()) for values in (loss, backward))
    if forward_sum > 0.0 and backward_sum > 0.0:
        backward *= request.backward_share * forward_sum / backward_sum
    return loss + backward


def in_lowest(request: SolveRequest, values: FloatArray) -> FloatArray:
    """Return ``values`` [linears, 3, formats] of every GEMM in its candidate with the fewest bits, [linears, 3]."""
    return np.stack([values[:, i, request.lowest(gemm)] for i, gemm in enumerate(Gemm)], axis=1)


def _normalised(request: SolveRequest, values: FloatArray) -> FloatArray:
    total = float(in_lowest(request, values).sum())
    return values / total if total > 0.0 else np.zeros_like(values)


def monotone(scores: FloatArray, formats: tuple[str, ...], candidate: BoolArray | None = None) -> FloatArray:
    """Raise scores [..., formats] so that fewer bits never score better than all formats of more bits.

    Measured or sampled scores may violate this (docs/method.md, Q: one score per option). Formats of equal bits keep
    their order.
    ``candidate``, of the scores' shape, says which formats an option may take; the others limit nothing.
    """
    projected = scores.copy()
    floor = np.full(scores.shape[:-1], -np.inf)
    for bits in sorted({BITS[f] for f in formats}, reverse=True):
        columns = [i for i, f in enumerate(formats) if BITS[f] == bits]
        projected[..., columns] = np.maximum(projected[..., columns], floor[..., None])
        own = projected[..., columns] if candidate is None else np.where(candidate, projected, np.inf)[..., columns]
        least = own.min(axis=-1)
        floor = np.where(np.isfinite(least), least, floor)
    return projected


def rounded(scores: FloatArray) -> FloatArray:
    """Round scores to 4 significant digits, so that layouts which differ in the last bits agree (docs/method.md)."""
    digits = SIGNIFICANT_DIGITS - 1
    # Decimal text gives the same double for the same digits; scaling by powers of ten does not.
    return np.array([float(f"{value:.{digits}e}") for value in scores.ravel()], dtype=np.float64).reshape(scores.shape)
