"""From statistics and a request to the Problem that a solver takes: options, costs, scores, pins, ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, option_id, split_option_id
from snip_megatron.sensitivity.groups import option_groups, spread_pins
from snip_megatron.sensitivity.loss_divergence import FloatArray
from snip_megatron.sensitivity.policies import divergences, pinned_formats, policy_scores
from snip_megatron.sensitivity.quality import monotone, rounded
from snip_megatron.sensitivity.request import SolveRequest, is_four_bit
from snip_megatron.solver.infeasible import why_infeasible
from snip_megatron.solver.problem import Choice, Item, Problem
from snip_megatron.solver.spanning import spanning_groups
from snip_megatron.solver.table import ChoiceTable
from snip_megatron.statistics.table import LinearRow, StatisticsTable

Scores = dict[str, dict[str, dict[str, float]]]
"""Option id → format → {"loss_divergence", "weight_divergence", "q"}; q is the loss of the Problem's choice."""

# Scores that tie are set apart by steps just above what 4 significant digits resolve (1e-3 at most); ties at 0 by
# the same steps of a number far below every other score, yet above the 1e-15 that a solver keeps in order.
_TIE_STEP = 2e-3
_TIE_AT_ZERO = 1e-9


@dataclass(frozen=True)
class Option:
    """One choice to make.

    Attributes:
        id: ``<linear>:<gemm>`` or ``<linear>``. stage: pipeline stage.
        flops: of a training step; what 4 bits save of the budget.
        cost: ``flops`` and the option's part of the FLOPs of its stage that no choice covers, so that Σ cost is all of
            the decoder's linears: the denominator of the fp4 share, overall and on every stage.
        pinned: the format that a pin fixes, on it or on another of its group, or None.
        group: name of the options that it shares a format with, or None.
    """

    id: str
    stage: int
    flops: float
    cost: float
    pinned: str | None
    group: str | None = None


def list_options(linears: Sequence[LinearRow], request: SolveRequest, tokens_per_step: int) -> list[Option]:
    """The options of a model in the order of its linears and GEMMs.

    Raises SnipError on a pin or group that matches nothing, and on pins that contradict inside a group.
    """
    if not linears:
        raise SnipError("the model has no linear that SNIP can choose formats for")
    gemms = tuple(Gemm) if request.granularity == "gemm" else (None,)
    gemms_each = len(Gemm) // len(gemms)
    names = [row.name for row in linears]
    groups = option_groups(names, request.groups, request.granularity)
    pinned = spread_pins(pinned_formats(names, request.pins, request.granularity), groups)
    flops = [tokens_per_step * row.flops * gemms_each for row in linears]
    factors = _cost_factors([(row.stage, f * len(gemms)) for row, f in zip(linears, flops, strict=True)], request)
    return [
        Option(key, row.stage, f, f * factors[row.stage], pinned.get(key), groups.get(key))
        for row, f in zip(linears, flops, strict=True)
        for key in (option_id(row.name, gemm) for gemm in gemms)
    ]


def _cost_factors(flops: Sequence[tuple[int, float]], request: SolveRequest) -> dict[int, float]:
    """Stage → (candidates' + unquantised FLOPs) / candidates' FLOPs.

    FLOPs of unknown stage, or of a stage without any candidate, are spread over all stages in proportion.
    """
    stages = sorted({stage for stage, _ in flops})
    own = {stage: math.fsum(f for s, f in flops if s == stage) for stage in stages}
    known = request.unquantised_stage_flops
    extra = {stage: float((known or {}).get(stage, 0.0)) for stage in stages}
    total = math.fsum(known.values()) if known else request.unquantised_flops
    elsewhere = max(total - math.fsum(extra.values()), 0.0) / math.fsum(own.values())
    return {stage: 1.0 + extra[stage] / own[stage] + elsewhere for stage in stages}


def _may_be_four_bit(option: Option, request: SolveRequest) -> bool:
    return any(is_four_bit(f) for f in ((option.pinned,) if option.pinned else request.formats))


def _reachable(options: Sequence[Option], request: SolveRequest) -> float:
    saved = math.fsum(o.flops for o in options if _may_be_four_bit(o, request))
    return saved / math.fsum(o.cost for o in options)


def reachable_share(linears: Sequence[LinearRow], request: SolveRequest, *, tokens_per_step: int = 1) -> float:
    """The highest budget that pins, unquantised linears and the stage constraint leave reachable, in [0, 1].

    ``tokens_per_step`` brings the linears' FLOPs to the scale of ``request.unquantised_flops``; without those it does
    not matter. Raises SnipError on a pin that matches nothing.
    """
    return _reachable_limit(list_options(linears, request, tokens_per_step), request)[0]


def _reachable_limit(options: Sequence[Option], request: SolveRequest) -> tuple[float, int | None]:
    """(highest reachable budget, the stage that limits it or None)."""
    limits: list[tuple[float, int | None]] = [(_reachable(options, request), None)]
    if request.stage_tolerance is not None:
        for stage in sorted({o.stage for o in options}):
            own = _reachable([o for o in options if o.stage == stage], request)
            limits.append((own + request.stage_tolerance, stage))
    lowest, limiting = min(limits, key=lambda limit: limit[0])
    return min(lowest, 1.0), limiting


def check_reachable(linears: Sequence[LinearRow], request: SolveRequest, *, tokens_per_step: int = 1) -> None:
    """Raise SnipError, naming the highest reachable budget, if ``request`` asks for more.

    A bound on the loss is never refused here: what is reachable depends on scores. Groups that no solve could try all
    formats of are refused as well.
    """
    check_groups(linears, request)
    if request.timed:
        _check_reachable_speedup(list_options(linears, request, tokens_per_step), request)
        return
    share, stage = _reachable_limit(list_options(linears, request, tokens_per_step), request)
    if request.target * (1.0 - 1e-9) > share:
        where = "" if stage is None else f" (stage {stage} limits it)"
        shown = math.floor(share * 1e4) / 1e4  # rounded down, so that asking for the figure shown succeeds
        raise SnipError(
            f"--snip-budget fp4={request.target:g} is unreachable: formats, pins and linears outside SNIP's choice"
            f" leave at most fp4={shown:.4f}{where}; lower the budget or remove a pin"
        )


def check_groups(linears: Sequence[LinearRow], request: SolveRequest) -> None:
    """Raise SnipError on pins and groups (``--snip-pin``, ``--snip-group``) that no map can meet."""
    if not request.groups:
        return
    items = tuple(_item(option, request, {}) for option in list_options(linears, request, 1))
    try:
        spanning_groups(Problem(items=items, budget=request.budget))
    except SnipError as error:
        raise SnipError(f"--snip-group {' '.join(request.groups)}: {error}") from None


def _check_reachable_speedup(options: Sequence[Option], request: SolveRequest) -> None:
    items = tuple(_item(option, request, {}) for option in options)
    problem = Problem(items=items, budget=request.budget)  # also finds formats without a predicted time
    if request.speedup is None:
        return
    choices = ChoiceTable.build(problem)
    if not choices.feasible(choices.most_saving()):
        raise SnipError(
            f"--snip-budget speedup={request.speedup:g} is unreachable with --snip-formats"
            f" {','.join(request.formats)} and the pins: by the times of {request.times and request.times.model},"
            f" {why_infeasible(choices, problem.budget).why} (seconds a step in the decoder's linears)"
        )


def build_problem(table: StatisticsTable, request: SolveRequest) -> tuple[Problem, Scores]:
    """The Problem of one update, and the scores behind it.

    Raises SnipError on an unknown policy, estimator, rule or format, on a pin that matches nothing, and on a table
    with a NaN or Inf (DESIGN, rule 5: such an update is dropped).
    """
    broken = table.non_finite()
    if broken:
        raise SnipError(f"the statistics of step {table.step} are not finite: {', '.join(broken[:3])}")
    options = list_options(table.linears, request, table.tokens_per_step)
    loss, weight = divergences(table, request)
    q = _per_option(policy_scores(table, request, loss, weight), request)
    if not np.all(np.isfinite(q)):
        raise SnipError(f"the scores of step {table.step} are not finite; the update is dropped")
    q = monotone(q, request.formats)
    flops = np.array([o.flops for o in options])
    for column, fmt in enumerate(request.formats):
        if is_four_bit(fmt):
            q[:, column] = _without_ties(q[:, column], flops / flops.mean(), request.seed)
    q = rounded(q)
    loss, weight = _per_option(loss, request), _per_option(weight, request)
    scores = {
        option.id: {
            fmt: {
                "loss_divergence": float(loss[i, f]),
                "weight_divergence": float(weight[i, f]),
                "q": float(q[i, f]),
            }
            for f, fmt in enumerate(request.formats)
        }
        for i, option in enumerate(options)
    }
    items = tuple(_item(option, request, scores[option.id]) for option in options)
    return Problem(items=items, budget=request.budget), scores


def change_penalty(problem: Problem, request: SolveRequest) -> float:
    """Loss a changed choice costs: ``request.change_penalty`` means of the options' largest losses."""
    worst = math.fsum(max(c.loss for c in item.choices) for item in problem.items) / len(problem.items)
    return request.change_penalty * max(worst, 0.0)


def _per_option(values: FloatArray, request: SolveRequest) -> FloatArray:
    """[linears, 3, formats] → [options, formats]: GEMMs side by side, or summed at granularity ``layer``."""
    if request.granularity == "layer":
        summed: FloatArray = values.sum(axis=1)
        return summed
    return values.reshape(-1, values.shape[-1])


def _without_ties(scores: FloatArray, size: FloatArray, seed: int) -> FloatArray:
    """Scores rounded to 4 digits, options of equal score *per FLOP* set apart in one seeded order.

    The order depends on the seed and the number of options alone, so it is the same for every policy (EVALUATION).
    """
    order = np.random.default_rng([seed % 2**64, 1]).permutation(len(scores))
    per_flop = scores / size
    equal = rounded(per_flop)
    at_zero = _TIE_AT_ZERO * (float(np.abs(per_flop).max()) or 1.0)
    separate = per_flop.copy()
    for value in np.unique(equal):
        group = order[equal[order] == value]
        if len(group) > 1:
            base = per_flop[group] if value else np.full(len(group), at_zero)
            separate[group] = base + np.abs(base) * _TIE_STEP * np.arange(len(group))
    return rounded(np.where(separate == per_flop, scores, separate * size))


def _item(option: Option, request: SolveRequest, scores: dict[str, dict[str, float]]) -> Item:
    formats = request.formats if option.pinned is None else (option.pinned,)
    cost, savings = option.cost, {fmt: option.flops if is_four_bit(fmt) else 0.0 for fmt in formats}
    if request.timed:
        cost, savings = _times(option.id, formats, request)
    choices = tuple(
        Choice(format=Format(fmt), loss=scores[fmt]["q"] if fmt in scores else 0.0, saving=savings[fmt])
        for fmt in formats
    )
    return Item(id=option.id, stage=option.stage, cost=cost, choices=choices, group=option.group)


def _times(option: str, formats: Sequence[str], request: SolveRequest) -> tuple[float, dict[str, float]]:
    """An option's seconds in bf16, and what each format takes less (negative: more)."""
    if request.times is None:
        raise SnipError("speedup= and loss= need predicted times")
    linear, gemm = split_option_id(option)
    cost = request.times.of(str(linear), gemm, Format.BF16.value)
    return cost, {fmt: cost - request.times.of(str(linear), gemm, fmt) for fmt in formats}
