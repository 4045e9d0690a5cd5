"""Q: loss divergence and weight divergence put together to one score an option, and made fit for a solver."""

from __future__ import annotations

import numpy as np

from snip_megatron.errors import SnipError
from snip_megatron.sensitivity.loss_divergence import DGRAD, FloatArray
from snip_megatron.sensitivity.request import BITS, SolveRequest

Q_RULES = ("split", "noise", "paper")
"""Values of ``--snip-q``; the first is the default."""

SIGNIFICANT_DIGITS = 4


def combine(request: SolveRequest, loss: FloatArray, weight: FloatArray, variance: FloatArray) -> FloatArray:
    """Q of every option by the rule ``request.q``; arrays float64 [linears, 3, formats].

    Args:
        loss: ΔL₂ in nats. weight: ΔW. variance: gradient variance added, as a share of the gradient's own.

    ``split``: ΔL₂ for fprop; for dgrad and wgrad ΔW, scaled so that they sum, in the lowest format, to
    ``backward_share`` of fprop's sum: the ratio of trained loss gaps. ``noise``: ΔL₂ + ``noise_nats`` · variance, in
    nats. ``paper``: ΔL/ΣΔL + ΔW/ΣΔW, each sum over all options in the lowest format. Raises SnipError on another rule.
    """
    if request.q == "split":
        return _split(request, loss, weight)
    if request.q == "noise":
        return loss + request.noise_nats * variance
    if request.q == "paper":
        return _normalised(loss, request.lowest) + _normalised(weight, request.lowest)
    raise SnipError(f"--snip-q {request.q}: unknown; choose one of {', '.join(Q_RULES)}")


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
    """Raise scores [..., formats] so that a format of fewer bits is never better than every one of more bits.

    Measured or sampled scores may come out the other way round (METHOD, the recipe). Formats of equal bits stay as
    they are to each other.
    """
    projected = scores.copy()
    floor = np.full(scores.shape[:-1], -np.inf)
    for bits in sorted({BITS[f] for f in formats}, reverse=True):
        columns = [i for i, f in enumerate(formats) if BITS[f] == bits]
        projected[..., columns] = np.maximum(projected[..., columns], floor[..., None])
        floor = projected[..., columns].min(axis=-1)
    return projected


def rounded(scores: FloatArray) -> FloatArray:
    """Scores rounded to 4 significant digits: equal on layouts that differ in the last bits (DESIGN, rule 6)."""
    digits = SIGNIFICANT_DIGITS - 1
    # Through decimal text: the same double for the same digits, which scaling by powers of ten does not give.
    return np.array([float(f"{value:.{digits}e}") for value in scores.ravel()], dtype=np.float64).reshape(scores.shape)
