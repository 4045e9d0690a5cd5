"""Policies: functions that score options, and maps that need no scores. ``snip`` is the method (docs/how-it-works.md).

Each policy computes one score per option for the same solver at the same granularity. An option that a policy protects
gets a high score; no choice is excluded. A policy that does not know the size of an option scores it in proportion to
its FLOPs. The solver weighs score against FLOPs saved, so it then follows the policy's order for all shapes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.sensitivity.divergence import (
    DGRAD,
    FPROP,
    FloatArray,
    second_order,
    weight_divergence,
)
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable

ESTIMATORS = ("fisher", "noise")
"""Values of ``--snip-estimator``; the first is the default."""

Q_RULES = ("split", "paper")
"""Values of ``--snip-q``; the first is the default."""

FIXED = ("uniform-fp8", "uniform-fp4", "bf16")
"""Policies with a fixed map. They measure and solve nothing."""

# Score of an 8-bit format relative to a 4-bit one, for rules that only say what to keep out of 4 bits. It is enough for
# the solver to prefer bf16 where that costs nothing.
_EIGHT_BIT_SHARE = 1e-3


def needs_forward_noise(request: SolveRequest) -> bool:
    """Whether the policy uses the forward-noise pass. Without it an update takes one probe pass."""
    return request.policy == "snip" and request.estimator == "noise"


def in_nats(policy: str, q: str) -> bool:
    """Return whether the scores of a policy are predicted losses in nats."""
    return policy == "fisher" or (policy == "snip" and q == "split")


def divergences(table: StatisticsTable, request: SolveRequest) -> tuple[FloatArray, FloatArray]:
    """Return (ΔL in nats, ΔW) of every option, float64 [linears, 3, formats]. ΔW is 0 if the policy does not use it.

    If a map raised the loss by more than was predicted, the table's ``correction`` is the factor of ΔL.
    """
    loss = table.meta.get("correction", 1.0) * second_order(table, request.formats)
    if not needs_forward_noise(request):
        return loss, np.zeros_like(loss)
    return loss, weight_divergence(table, request.formats)


def _snip(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Q, by the rule ``request.q``.

    - ``split``: ΔL₂ for fprop. For dgrad and wgrad ΔW, scaled so that its sum in the lowest format is
      ``backward_share`` times that of fprop: the ratio of trained loss gaps.
    - ``paper``: ΔL/ΣΔL + ΔW/ΣΔW. Each sum is over all options in the lowest format.
    """
    if request.estimator not in ESTIMATORS:
        raise SnipError(f"--snip-estimator {cut(request.estimator)}: unknown; choose one of {', '.join(ESTIMATORS)}")
    if request.q == "split":
        backward = weight.copy()
        backward[:, :DGRAD] = 0.0
        forward_sum, backward_sum = _sum_in_lowest(request, loss), _sum_in_lowest(request, backward)
        if forward_sum > 0.0 and backward_sum > 0.0:
            backward *= request.backward_share * forward_sum / backward_sum
        return loss + backward
    if request.q == "paper":
        sums = [(values, _sum_in_lowest(request, values)) for values in (loss, weight)]
        q: FloatArray = sum((values / total for values, total in sums if total > 0.0), np.zeros_like(loss))
        return q
    raise SnipError(f"--snip-q {cut(request.q)}: unknown; choose one of {', '.join(Q_RULES)}")


def _sum_in_lowest(request: SolveRequest, values: FloatArray) -> float:
    """Sum ``values`` [linears, 3, formats] over all GEMMs, each in its candidate with the fewest bits."""
    return float(np.stack([values[:, i, request.lowest(gemm)] for i, gemm in enumerate(Gemm)], axis=1).sum())


def _rule(table: StatisticsTable, request: SolveRequest, protection: FloatArray) -> FloatArray:
    """Scores from a protection [linears, 3], in proportion to FLOPs; more than four bits cost little or nothing."""
    flops = np.array([row.flops for row in table.linears])
    by_bits = {16: 0.0, 8: _EIGHT_BIT_SHARE, 4: 1.0}
    weights = np.array([by_bits[Format(f).bits] for f in request.formats])
    scores: FloatArray = protection[:, :, None] * (flops / flops.mean())[:, None, None] * weights
    return scores


def _backward_first(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """dgrad and wgrad go to four bits first, in the seeded order; then fprops, by loss divergence."""
    top = float(loss.max())
    scores = loss / top if top > 0.0 else loss.copy()
    # The floor places even an fprop of loss divergence 0 after every dgrad and wgrad, which score 0, or 1e-9 of the
    # largest score once ties are broken.
    scores[:, FPROP] += _rule(table, request, np.full((len(table.linears), len(Gemm)), 1e-6))[:, FPROP]
    scores[:, DGRAD:] = 0.0
    return scores


_SCORES: Mapping[str, Callable[[StatisticsTable, SolveRequest, FloatArray, FloatArray], FloatArray]] = {
    "snip": _snip,
    "backward-first": _backward_first,
    "fisher": lambda table, request, loss, weight: loss,  # of ModelOpt AutoQuantize: dgrad and wgrad cost nothing
}

POLICIES = (*_SCORES, *FIXED)
"""Values of ``--snip-policy``; the first is the default."""


def policy_scores(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the score of every option by ``request.policy``, float64 [linears, 3, formats]. Lower is better.

    ``loss`` and ``weight`` are :func:`divergences`. Raises SnipError if the policy is unknown or has a fixed map.
    """
    if request.policy in FIXED:
        raise SnipError(f"--snip-policy {request.policy} fixes the map; there is nothing to solve")
    if request.policy not in _SCORES:
        raise SnipError(f"--snip-policy {cut(request.policy)}: unknown; choose one of {', '.join(POLICIES)}")
    return _SCORES[request.policy](table, request, loss, weight)


# -- maps that are known before training -----------------------------------------------------------------------
def fixed_format(policy: str, formats: Sequence[str] = ()) -> Format:
    """Return the format of all GEMMs under a policy of :data:`FIXED`.

    ``formats`` are the candidates. ``uniform-fp8`` takes the candidate of 8 bits, by default fp8. ``uniform-fp4`` takes
    that of 4 bits, by default fp4.
    """
    if policy == "bf16":
        return Format.BF16
    bits, default = (8, Format.FP8) if policy == "uniform-fp8" else (4, Format.FP4)
    matching = [fmt for fmt in map(Format, formats) if fmt.bits == bits and fmt.base is fmt]
    return matching[0] if matching and default not in matching else default


def formats_of(policy: str, formats: Sequence[str] = (), pins: Sequence[tuple[str, str]] = ()) -> frozenset[Format]:
    """Return all formats that maps of a policy may have: of its fixed map or the candidates, and those of pins."""
    in_maps = {fixed_format(policy, formats)} if policy in FIXED else set(map(Format, formats))
    return frozenset(in_maps | {Format(fmt) for _, fmt in pins})


def fixed_map(
    policy: str, linears: Iterable[str], pins: Sequence[tuple[str, str]] = (), formats: Sequence[str] = ()
) -> PrecisionMap | None:
    """Return the map of a policy of :data:`FIXED` with (glob, format) ``pins`` applied. None for other policies.

    ``formats`` are the candidates. Raises SnipError if a pin matches nothing.
    """
    if policy not in FIXED:
        return None
    names, fmt = list(linears), fixed_format(policy, formats)
    choices = {option_id(name, gemm): fmt for name in names for gemm in Gemm}
    return PrecisionMap(choices=choices | pinned_formats(names, pins))
