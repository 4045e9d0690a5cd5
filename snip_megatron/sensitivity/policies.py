"""Policies: what scores the options. ``snip`` is the method, the others are baselines (EVALUATION).

Each gives a score per option to the same solver at the same granularity; protection is a score, never a hard rule. A
rule that knows nothing of an option's size scores it in proportion to its FLOPs, so that the solver, which weighs score
against FLOPs saved, follows the rule's order whatever the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id, split_option_id
from snip_megatron.sensitivity.groups import option_groups, spread_pins
from snip_megatron.sensitivity.loss_divergence import DGRAD, FPROP, FloatArray, format_column, second_order
from snip_megatron.sensitivity.measured import measured_divergences, measured_variance
from snip_megatron.sensitivity.quality import combine
from snip_megatron.sensitivity.request import BITS, SolveRequest
from snip_megatron.sensitivity.weight_divergence import added_variance, weight_divergence
from snip_megatron.statistics.table import StatisticsTable

ESTIMATORS = ("noise", "fisher", "measured")
"""Values of ``--snip-estimator``; the first is the default."""

FIXED: Mapping[str, Format] = {"uniform-fp8": Format.FP8, "uniform-fp4": Format.FP4, "bf16": Format.BF16}
"""Policies that choose nothing and ignore the budget."""

TAIL_SHARE = 0.15
"""Share of the blocks, from the end, that ``tail`` protects (rule of NVIDIA's NVFP4 recipe)."""

# What an 8-bit format costs a rule that only says what to keep out of 4 bits: enough to prefer bf16 where that is free.
_EIGHT_BIT_SHARE = 1e-3


def needs_forward_noise(request: SolveRequest) -> bool:
    """Whether the policy uses the forward-noise pass: without it an update costs one probe pass."""
    return request.policy == "snip" and request.estimator in ("noise", "measured")


def needs_hessian(request: SolveRequest) -> bool:
    """Whether the policy uses Hessian traces: two passes a probe vector."""
    return request.policy == "hawq"


def divergences(table: StatisticsTable, request: SolveRequest) -> tuple[FloatArray, FloatArray]:
    """(ΔL in nats, ΔW) of every option, float64 [linears, 3, formats]; ΔW is 0 where the policy does not need it."""
    loss = second_order(table, request.formats)
    if not needs_forward_noise(request):
        return loss, np.zeros_like(loss)
    drift = weight_divergence(table, request.formats, backward_noise=request.backward_noise)
    if request.estimator == "measured":
        return measured_divergences(table, request.formats, loss, drift)
    return loss, drift


def _snip(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    if request.estimator not in ESTIMATORS:
        raise SnipError(f"--snip-estimator {request.estimator}: unknown; choose one of {', '.join(ESTIMATORS)}")
    variance = np.zeros_like(loss)
    if request.q == "noise" and needs_forward_noise(request):
        variance = added_variance(table, request.formats, backward_noise=request.backward_noise)
        if request.estimator == "measured":
            variance = measured_variance(table, request.formats, variance)
    return combine(request, loss, weight, variance)


def _fisher(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """(G·E)², ModelOpt AutoQuantize's score: nothing for dgrad and wgrad."""
    return loss


def _hawq(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """½·Tr(H)/NK·‖δW‖², in nats: HAWQ-V2's average trace times squared error, what a random δW of that size costs.

    It knows weights as operands of the forward alone: nothing for dgrad and wgrad.
    """
    elements = np.array([row.elements for row in table.linears])
    scores = np.zeros_like(loss)
    average = table.linear["htrace"] / elements
    scores[:, FPROP] = 0.5 * average[:, None] * format_column(table, "dw2", request.formats)
    return scores


def _errors(table: StatisticsTable, request: SolveRequest, relative: bool) -> FloatArray:
    """Sum of the Frobenius norms of both operands' errors, or of those relative to the operands' own norms."""
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


def _min_abs_err(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    return _errors(table, request, relative=False)


def _min_rel_err(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    return _errors(table, request, relative=True)


def _rule(table: StatisticsTable, request: SolveRequest, protection: FloatArray) -> FloatArray:
    """Scores from a protection [linears, 3], in proportion to FLOPs; formats of more bits are (almost) free."""
    flops = np.array([row.flops for row in table.linears])
    by_bits = {16: 0.0, 8: _EIGHT_BIT_SHARE, 4: 1.0}
    weights = np.array([by_bits[BITS[f]] for f in request.formats])
    scores: FloatArray = protection[:, :, None] * (flops / flops.mean())[:, None, None] * weights
    return scores


def _random(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Seeded uniform in (0, 1]: one draw an option, or one a linear at granularity ``layer``."""
    draws = 1.0 - np.random.default_rng([request.seed % 2**64, 0]).random((len(table.linears), len(Gemm)))
    if request.granularity == "layer":
        draws[:] = draws[:, :1]
    return _rule(table, request, draws)


def _per_block(table: StatisticsTable, protect: Callable[[int, int], float]) -> FloatArray:
    blocks = 1 + max(row.id.layer for row in table.linears)
    values = np.array([protect(row.id.layer, blocks) for row in table.linears])
    return np.repeat(values[:, None], len(Gemm), axis=1)


def _layer_id(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Protects the first and the last blocks, the outermost most: 1.3 times more for each block further out."""
    return _rule(table, request, _per_block(table, lambda i, blocks: 1.3 ** -min(i, blocks - 1 - i)))


def _tail(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Protects the last 15 % of the blocks, at least one."""

    def protect(layer: int, blocks: int) -> float:
        kept = max(1, round(TAIL_SHARE * blocks))
        return 1.0 if layer >= blocks - kept else 0.0

    return _rule(table, request, _per_block(table, protect))


def _layer_type(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Protects the kinds of ``request.protected_kinds``, the first ten times more than the second, and so on."""
    kinds = request.protected_kinds
    levels = {kind: 10.0**-rank for rank, kind in enumerate(kinds)}
    # Of experts like the dense MLP's that they stand for.
    values = np.array([levels.get(row.id.kind.replace(".experts.", "."), 0.0) for row in table.linears])
    return _rule(table, request, np.repeat(values[:, None], len(Gemm), axis=1))


def _backward_first(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """dgrad and wgrad to 4 bits first, in the seeded order; then fprops by loss divergence."""
    top = float(loss.max())
    scores = loss / top if top > 0.0 else loss.copy()
    # A floor keeps even an fprop without any loss divergence behind every dgrad and wgrad, whose scores are 0 (and
    # 1e-9 of the largest once ties are broken).
    scores[:, FPROP] += _rule(table, request, np.full((len(table.linears), len(Gemm)), 1e-6))[:, FPROP]
    scores[:, DGRAD:] = 0.0
    return scores


_Score = Callable[[StatisticsTable, SolveRequest, FloatArray, FloatArray], FloatArray]

_SCORES: Mapping[str, _Score] = {
    "snip": _snip,
    "random": _random,
    "min-abs-err": _min_abs_err,
    "min-rel-err": _min_rel_err,
    "backward-first": _backward_first,
    "fisher": _fisher,
    "hawq": _hawq,
    "layer-id": _layer_id,
    "layer-type": _layer_type,
    "tail": _tail,
}

POLICIES = (*_SCORES, *FIXED)
"""Values of ``--snip-policy``; the first is the default."""


def policy_scores(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Score of every option by ``request.policy``, float64 [linears, 3, formats]: lower is better.

    ``loss`` and ``weight`` are :func:`divergences`. Raises SnipError on an unknown policy or one that chooses nothing.
    """
    if request.policy in FIXED:
        raise SnipError(f"--snip-policy {request.policy} fixes the map; there is nothing to solve")
    if request.policy not in _SCORES:
        raise SnipError(f"--snip-policy {request.policy}: unknown; choose one of {', '.join(POLICIES)}")
    return _SCORES[request.policy](table, request, loss, weight)


# -- pins --------------------------------------------------------------------------------------------------------
def pinned_formats(
    linears: Iterable[str], pins: tuple[tuple[str, str], ...], granularity: str = "gemm"
) -> dict[str, str]:
    """Option id → format of every option that a pin fixes; the last match wins.

    A glob is matched against ``<linear>`` and, at granularity ``gemm``, against ``<linear>:<gemm>``. Raises SnipError
    on a pin that matches nothing.
    """
    names = list(linears)
    gemms = tuple(Gemm) if granularity == "gemm" else (None,)
    fixed: dict[str, str] = {}
    for glob, fmt in pins:
        keys = [
            key
            for name in names
            for key in (option_id(name, gemm) for gemm in gemms)
            if fnmatchcase(name, glob) or fnmatchcase(key, glob)
        ]
        if not keys:
            hint = (
                "at granularity layer a pin names linears, not GEMMs"
                if granularity == "layer" and ":" in glob
                else f"the first option is {option_id(names[0], gemms[0])}"
                if names
                else "the model has no candidate linear"
            )
            raise SnipError(f"--snip-pin {glob}={fmt}: matches no option; {hint}")
        fixed |= dict.fromkeys(keys, fmt)
    return fixed


def pinned_gemms(linears: Iterable[str], request: SolveRequest) -> set[tuple[str, Gemm]]:
    """(linear, GEMM) of everything that the request's pins fix, at either granularity. Raises as pinned_formats."""
    found = set()
    for key in pinned_formats(linears, request.pins, request.granularity):
        linear, gemm = split_option_id(key)
        found |= {(str(linear), each) for each in (tuple(Gemm) if gemm is None else (gemm,))}
    return found


def fixed_map(
    policy: str, linears: Iterable[str], pins: tuple[tuple[str, str], ...] = (), groups: tuple[str, ...] = ()
) -> PrecisionMap | None:
    """The map of ``uniform-fp8``, ``uniform-fp4`` or ``bf16`` with pins applied; None for a policy that solves.

    A pin holds for the whole group (``--snip-group``) of what it matches. Raises SnipError on a pin or group that
    matches nothing, and on pins that contradict inside a group.
    """
    if policy not in FIXED:
        return None
    names = list(linears)
    choices = dict(PrecisionMap.uniform(names, FIXED[policy]).choices)
    pinned = spread_pins(pinned_formats(names, pins), option_groups(names, groups))
    choices |= {key: Format(fmt) for key, fmt in pinned.items()}
    return PrecisionMap(choices=choices)
