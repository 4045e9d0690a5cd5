"""Policies: functions that score options, and maps that need no scores. ``snip`` is the method (docs/how-it-works.md).

Each policy computes one score per option for the same solver at the same granularity. An option that a policy protects
gets a high score; no choice is excluded. A policy that does not know the size of an option scores it in proportion to
its FLOPs. The solver weighs score against FLOPs saved, so it then follows the policy's order for all shapes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, fp4_fraction, option_id
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.sensitivity.divergence import (
    DGRAD,
    FPROP,
    FloatArray,
    format_column,
    second_order,
    weight_divergence,
)
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable

ESTIMATORS = ("fisher", "noise")  # values of ``--snip-estimator``; the first is the default

Q_RULES = ("split", "paper")  # values of ``--snip-q``; the first is the default

FIXED = ("uniform-fp8", "uniform-fp4", "bf16", "nvidia", "mxfp8-forward")
"""Policies with a fixed map.

``nvidia`` is the recipe of NVIDIA's NVFP4 training (arXiv 2509.25149): the last 15 % of the blocks in bf16, all other
GEMMs in four bits, Hadamard transforms in wgrad, gradients rounded stochastically. ``mxfp8-forward`` has fprop in mxfp8
and the backward in four bits, as a recipe that Transformer Engine ships.
"""

LATE = ("late-forward", "late-all")
"""Policies with a fixed plan of two maps: four bits, then better formats, for as many steps as the share allows.

``late-all`` follows NVIDIA's training of a 12 B model. The appendix of its report prefers to switch the forward alone.
"""

TAIL_SHARE = 0.15  # share of the blocks, from the end, that NVIDIA's NVFP4 recipe keeps in bf16

_PROTECTED = ("mlp.linear_fc2", "self_attention.linear_proj")  # what ``layer-type`` protects, the most protected first

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


def _errors(
    table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray, *, relative: bool
) -> FloatArray:
    """Sum of the Frobenius norms of both operands' errors, with ``relative`` each over the norm of its operand."""
    operands = (("dx_row2", "x2", "dw2", "w2"), ("dg_row2", "g2", "dw2", "w2"), ("dg_col2", "g2", "dx_col2", "x2"))
    scores = np.zeros((len(table.linears), len(Gemm), len(request.formats)))
    for gemm, operand in enumerate(operands):
        for error, size in (operand[:2], operand[2:]):
            norm = table.linear[size][:, None]
            safe = np.where(norm > 0.0, norm, 1.0) if relative else 1.0
            scores[:, gemm] += np.sqrt(format_column(table, error, request.formats) / safe)
    return scores


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
    first = 1 + max(layers) - tail_blocks(1 + max(layers))
    return _per_linear(float(layer >= first) for layer in layers)


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
    # The floor places even an fprop of loss divergence 0 after every dgrad and wgrad, which score 0, or 1e-9 of the
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

UNSOLVED = (*FIXED, *LATE)  # policies whose maps are known before training: they measure and solve nothing

POLICIES = (*_SCORES, *_RULES, *UNSOLVED)  # values of ``--snip-policy``; the first is the default


def policy_scores(table: StatisticsTable, request: SolveRequest, loss: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the score of every option by ``request.policy``, float64 [linears, 3, formats]. Lower is better.

    ``loss`` and ``weight`` are :func:`divergences`. Raises SnipError if the policy is unknown or has a fixed map.
    """
    if request.policy in UNSOLVED:
        raise SnipError(f"--snip-policy {request.policy} fixes the map; there is nothing to solve")
    if request.policy in _RULES:
        return _rule(table, request, _RULES[request.policy](table, request))
    if request.policy not in _SCORES:
        raise SnipError(f"--snip-policy {cut(request.policy)}: unknown; choose one of {', '.join(POLICIES)}")
    return _SCORES[request.policy](table, request, loss, weight)


# -- maps that are known before training -----------------------------------------------------------------------
_HADAMARD = {Format.NVFP4: Format.NVFP4_HADAMARD, Format.MXFP4: Format.MXFP4_HADAMARD}


def tail_blocks(blocks: int) -> int:
    """Return how many blocks, of ``blocks`` and from the end, stay in bf16. It is at least one."""
    return max(1, round(TAIL_SHARE * blocks))


def fixed_formats(policy: str, formats: Sequence[str] = ()) -> tuple[dict[Gemm, Format], dict[Gemm, Format]]:
    """Return the formats of a policy of :data:`FIXED` by GEMM: those of most blocks, and those of the last ones.

    ``formats`` are the candidates. ``uniform-fp8`` takes the candidate of 8 bits, by default fp8. ``uniform-fp4`` takes
    that of 4 bits, by default fp4. The recipes take nvfp4 or mxfp4, whichever is a candidate, by default nvfp4.
    """
    candidates = [Format(name) for name in formats]
    low = next((fmt for fmt in candidates if fmt in _HADAMARD), Format.NVFP4)
    bf16, most = dict.fromkeys(Gemm, Format.BF16), dict.fromkeys(Gemm, low)
    if policy == "bf16":
        return bf16, bf16
    if policy == "nvidia":
        return most | {Gemm.WGRAD: _HADAMARD[low]}, bf16
    if policy == "mxfp8-forward":
        most = most | {Gemm.FPROP: Format.MXFP8}
        return most, most
    bits, default = (8, Format.FP8) if policy == "uniform-fp8" else (4, Format.FP4)
    matching = [fmt for fmt in candidates if fmt.bits == bits and fmt.base is fmt]
    uniform = dict.fromkeys(Gemm, matching[0] if matching and default not in matching else default)
    return uniform, uniform


def formats_of(policy: str, formats: Sequence[str] = (), pins: Sequence[tuple[str, str]] = ()) -> frozenset[Format]:
    """Return all formats that maps of a policy may have: of its fixed map or the candidates, and those of pins."""
    in_maps: set[Format] = set(map(Format, formats))
    if policy in FIXED:
        most, last = fixed_formats(policy, formats)
        in_maps = {*most.values(), *last.values()}
    return frozenset(in_maps | {Format(fmt) for _, fmt in pins})


def fixed_map(
    policy: str, linears: Iterable[str], pins: Sequence[tuple[str, str]] = (), formats: Sequence[str] = ()
) -> PrecisionMap | None:
    """Return the map of a policy of :data:`FIXED` with (glob, format) ``pins`` applied. None for other policies.

    ``formats`` are the candidates. Raises SnipError if a pin matches nothing.
    """
    if policy not in FIXED:
        return None
    most, last = fixed_formats(policy, formats)
    layer = {name: LinearId.parse(name).layer for name in linears}
    blocks = 1 + max(layer.values(), default=0)
    tail = blocks - tail_blocks(blocks)
    of_layer = {name: last if at >= tail else most for name, at in layer.items()}
    choices = {option_id(name, gemm): by_gemm[gemm] for name, by_gemm in of_layer.items() for gemm in Gemm}
    return PrecisionMap(choices=choices | pinned_formats(layer, pins))


# -- plans of two maps ---------------------------------------------------------------------------------------------
def late_shares(
    request: SolveRequest, flops: Mapping[str, float], unquantised: float = 0.0
) -> tuple[tuple[PrecisionMap, float], tuple[PrecisionMap, float]]:
    """Return the map of the first steps and the map of the last steps, with pins applied, and their fp4 shares.

    ``flops`` are those a token of one GEMM by the linear's name, ``unquantised`` those of all GEMMs that no map covers.
    Raises SnipError if no candidate format has four bits, if a pin is invalid, or if the budget is above the share of
    the first map, so that no plan reaches it.
    """
    low = {gemm: Format(request.formats[request.lowest(gemm)]) for gemm in Gemm}
    if any(fmt.bits > 4 for fmt in low.values()):
        raise SnipError(
            f"--snip-policy {request.policy} begins in four bits, and none of --snip-formats"
            f" {cut(','.join(request.formats))} has; add fp4"
        )
    better = {gemm: max(map(Format, request.formats_of(gemm)), key=lambda fmt: fmt.bits) for gemm in Gemm}
    better = {gemm: Format.BF16 if fmt.bits == low[gemm].bits else fmt for gemm, fmt in better.items()}
    switched = (Gemm.FPROP,) if request.policy == "late-forward" else tuple(Gemm)
    first = {option_id(name, gemm): low[gemm] for name in flops for gemm in Gemm}
    last = first | {option_id(name, gemm): better[gemm] for name in flops for gemm in switched}
    fixed = pinned_formats(flops, request.pins)
    early, late = PrecisionMap(choices=first | fixed), PrecisionMap(choices=last | fixed)
    high = fp4_fraction(early, flops, unquantised)
    if high < request.budget.value - 1e-9:
        raise SnipError(
            f"--snip-policy {request.policy} reaches an average fp4 share of {math.floor(high * 1e4) / 1e4:.4f} at"
            f" most, less than the {request.budget.value:g} of --snip-budget; lower the budget or pin less"
        )
    return (early, high), (late, fp4_fraction(late, flops, unquantised))


def late_plan(
    request: SolveRequest,
    flops: Mapping[str, float],
    origin: int,
    last: int,
    unquantised: float = 0.0,
    *,
    step: int | None = None,
    spent: float = 0.0,
) -> PrecisionPlan:
    """Return the plan of a run over the steps [origin, last): as many precise steps as the average share allows.

    ``step`` is the first step of the plan if the run has begun before, and ``spent`` Σ of the fp4 shares of the steps
    before it. The other arguments and errors are those of :func:`late_shares`.
    """
    (early, high), (late, low) = late_shares(request, flops, unquantised)
    begin = origin if step is None else step
    steps, remaining = last - origin, last - begin
    spare = max(0.0, math.fsum([spent, remaining * high, -request.budget.value * steps]))
    precise = 0 if high <= low else min(remaining, math.floor(spare / (high - low) + 1e-9))
    parts = [(begin, remaining - precise, early, high), (last - precise, precise, late, low)]
    phases = tuple(
        PlanPhase(begin, replace(precision_map, target=request.budget.value, achieved=share))
        for begin, count, precision_map, share in parts
        if count
    )
    average = math.fsum([spent, *(count * share for _, count, _, share in parts)]) / steps
    return PrecisionPlan(phases, last, target=request.budget.value, achieved=average)
