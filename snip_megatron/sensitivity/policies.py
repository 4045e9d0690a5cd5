"""Policies: the functions that score options. ``snip`` is the method, the others are baselines (docs/how-it-works.md).

Each policy computes one score per option for the same solver at the same granularity. An option that a policy protects
gets a high score; no choice is excluded. A policy that does not know the size of an option scores it in proportion to
its FLOPs. The solver weighs score against FLOPs saved, so it then follows the policy's order for all shapes.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.sensitivity.divergence import (
    DGRAD,
    FPROP,
    FloatArray,
    format_column,
    second_order,
    weight_divergence,
)
from snip_megatron.sensitivity.fixed import FIXED, LATE, tail_blocks
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable

ESTIMATORS = ("noise", "fisher")
"""Values of ``--snip-estimator``; the first is the default."""

Q_RULES = ("split", "paper")
"""Values of ``--snip-q``; the first is the default."""

_PROTECTED = ("mlp.linear_fc2", "self_attention.linear_proj")
"""What ``layer-type`` protects, the most protected first."""

# Score of an 8-bit format relative to a 4-bit one, for rules that only say what to keep out of 4 bits. It is enough for
# the solver to prefer bf16 where that costs nothing.
_EIGHT_BIT_SHARE = 1e-3


def needs_forward_noise(request: SolveRequest) -> bool:
    """Whether the policy uses the forward-noise pass. Without it an update takes one probe pass."""
    return request.policy == "snip" and request.estimator == "noise"


def divergences(table: StatisticsTable, request: SolveRequest) -> tuple[FloatArray, FloatArray]:
    """Return (ΔL in nats, ΔW) of every option, float64 [linears, 3, formats]. ΔW is 0 if the policy does not use it."""
    loss = second_order(table, request.formats)
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
        known = ", ".join(ESTIMATORS)
        raise SnipError(f"--snip-estimator {cut(request.estimator)}: unknown; choose one of {known}")
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


def _errors(
    table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray, *, relative: bool
) -> FloatArray:
    """Sum of the Frobenius norms of both operands' errors, with ``relative`` each over the norm of its operand."""
    operands = (("dx_row2", "x2", "dw2", "w2"), ("dg_row2", "g2", "dw2", "w2"), ("dg_col2", "g2", "dx_col2", "x2"))
    scores = []
    for operand in operands:
        total = np.zeros((len(table.linears), len(request.formats)))
        for error, size in (operand[:2], operand[2:]):
            norm = table.linear[size][:, None] if relative else np.ones((len(table.linears), 1))
            safe = np.where(norm > 0.0, norm, 1.0)
            total += np.sqrt(format_column(table, error, request.formats) / safe)
        scores.append(total)
    return np.stack(scores, axis=1)


def _rule(table: StatisticsTable, request: SolveRequest, protection: FloatArray) -> FloatArray:
    """Scores from a protection [linears, 3], in proportion to FLOPs; more than four bits cost little or nothing."""
    flops = np.array([row.flops for row in table.linears])
    by_bits = {16: 0.0, 8: _EIGHT_BIT_SHARE, 4: 1.0}
    weights = np.array([by_bits[Format(f).bits] for f in request.formats])
    scores: FloatArray = protection[:, :, None] * (flops / flops.mean())[:, None, None] * weights
    return scores


def _random(table: StatisticsTable, request: SolveRequest) -> FloatArray:
    """Seeded uniform protection in (0, 1]: one draw per option, or one per linear at granularity ``layer``."""
    draws = 1.0 - np.random.default_rng([request.seed % 2**64, 0]).random((len(table.linears), len(Gemm)))
    return np.repeat(draws[:, :1], len(Gemm), axis=1) if request.granularity == "layer" else draws


def _per_linear(values: Iterable[float]) -> FloatArray:
    return np.repeat(np.array(list(values))[:, None], len(Gemm), axis=1)


def _layer_id(table: StatisticsTable, request: SolveRequest) -> FloatArray:
    """Protects the first and the last blocks. Each block further out is protected 1.3 times more."""
    layers = [row.id.layer for row in table.linears]
    return _per_linear(1.3 ** -min(i, max(layers) - i) for i in layers)


def _tail(table: StatisticsTable, request: SolveRequest) -> FloatArray:
    """Protects the last 15 % of the blocks, at least one."""
    layers = [row.id.layer for row in table.linears]
    kept = 1 + max(layers) - tail_blocks(1 + max(layers))
    return _per_linear(float(layer >= kept) for layer in layers)


def _layer_type(table: StatisticsTable, request: SolveRequest) -> FloatArray:
    """Protects kinds of linears, each ten times more than the next."""
    levels = {kind: 10.0**-rank for rank, kind in enumerate(_PROTECTED)}
    # The linears of experts count as those of the dense MLP that they replace.
    paths = [row.id.path.replace(".experts.", ".").replace(".shared_experts.", ".") for row in table.linears]
    return _per_linear(levels.get(path, 0.0) for path in paths)


def _backward_first(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """dgrad and wgrad go to four bits first, in the seeded order; then fprops, by loss divergence."""
    top = float(loss.max())
    scores = loss / top if top > 0.0 else loss.copy()
    # The floor places even an fprop of loss divergence 0 after every dgrad and wgrad. Those score 0, or 1e-9 of the
    # largest score once ties are broken.
    scores[:, FPROP] += _rule(table, request, np.full((len(table.linears), len(Gemm)), 1e-6))[:, FPROP]
    scores[:, DGRAD:] = 0.0
    return scores


_SCORES: Mapping[str, Callable[[StatisticsTable, SolveRequest, FloatArray, FloatArray], FloatArray]] = {
    "snip": _snip,
    "min-abs-err": partial(_errors, relative=False),
    "min-rel-err": partial(_errors, relative=True),
    "backward-first": _backward_first,
    "fisher": lambda table, request, loss, weight: loss,  # of ModelOpt AutoQuantize: dgrad and wgrad cost nothing
}
_RULES = {"random": _random, "layer-id": _layer_id, "layer-type": _layer_type, "tail": _tail}

UNSOLVED = (*FIXED, *LATE)
"""Policies whose maps are known before training: they measure and solve nothing."""

POLICIES = (*_SCORES, *_RULES, *UNSOLVED)
"""Values of ``--snip-policy``; the first is the default."""


def policy_scores(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the score of every option by ``request.policy``, float64 [linears, 3, formats]. Lower is better.

    ``loss`` and ``weight`` are :func:`divergences`. Raises SnipError if the policy is unknown or has a fixed map.
    """
    if request.policy in UNSOLVED:
        raise SnipError(f"--snip-policy {request.policy} fixes the map; there is nothing to solve")
    if request.policy in _RULES:
        return _rule(table, request, _RULES[request.policy](table, request))
    if request.policy not in _SCORES:
        known = ", ".join(POLICIES)
        raise SnipError(f"--snip-policy {cut(request.policy)}: unknown; choose one of {known}")
    return _SCORES[request.policy](table, request, loss, weight)
