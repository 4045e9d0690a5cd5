"""Q: loss divergence and weight divergence combined into one score per option, and prepared for a solver."""

from __future__ import annotations

import numpy as np

from snip_megatron.errors import SnipError, cut
from snip_megatron.sensitivity.loss_divergence import DGRAD, FloatArray
from snip_megatron.sensitivity.request import BITS, SolveRequest

Q_RULES = ("split", "noise", "paper")
"""Values of ``--snip-q``; the first is the default."""

SIGNIFICANT_DIGITS = 4


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
        return _normalised(loss, request.lowest) + _normalised(weight, request.lowest)
    raise SnipError(f"--snip-q {cut(request.q)}: unknown; choose one of {', '.join(Q_RULES)}")


def _split(request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    backward = weight.copy()
    backward[:, :DGRAD] = 0.0
    forward_sum = float(loss[:, :, request.lowest].sum())
    backward_sum = float(backward[:, :, request.lowest].sum())
    if forward_sum > 0.0 and backward_sum > 0.0:
        backward *= request.backward_share * forward_sum / backward_sum
    return loss + backward


def _normalised(values: FloatArray, lowest: int) -> FloatArray:
    total = float(values[:, :, lowest].sum())
    return values / total if total > 0.0 else np.zeros_like(values)


def monotone(scores: FloatArray, formats: tuple[str, ...]) -> FloatArray:
    """Raise scores [..., formats] so that fewer bits never score better than all formats of more bits.

    Measured or sampled scores may violate this (docs/method.md, Q: one score per option). Formats of equal bits keep
    their order.
    """
    projected = scores.copy()
    floor = np.full(scores.shape[:-1], -np.inf)
    for bits in sorted({BITS[f] for f in formats}, reverse=True):
        columns = [i for i, f in enumerate(formats) if BITS[f] == bits]
        projected[..., columns] = np.maximum(projected[..., columns], floor[..., None])
        floor = projected[..., columns].min(axis=-1)
    return projected


def rounded(scores: FloatArray) -> FloatArray:
    """Round scores to 4 significant digits, so that layouts which differ in the last bits agree (docs/method.md)."""
    digits = SIGNIFICANT_DIGITS - 1
    # Decimal text gives the same double for the same digits; scaling by powers of ten does not.
    return np.array([float(f"{value:.{digits}e}") for value in scores.ravel()], dtype=np.float64).reshape(scores.shape)
