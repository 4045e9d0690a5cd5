"""The solver's Problem of one update, from statistics and a request."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision import FOUR_BIT, Format, Gemm, LinearRow, option_id
from snip_megatron.precision.errors import SnipError, cut, quoted
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.sensitivity.divergence import FPROP, FloatArray
from snip_megatron.sensitivity.policies import divergences, policy_scores
from snip_megatron.sensitivity.request import PhasedRequest, SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.sensitivity.times import SHARING
from snip_megatron.solver.problem import Choice, Item, Phase, Problem, Spent
from snip_megatron.solver.solution import infeasibility

Scores = dict[str, dict[str, dict[str, float]]]
"""Option id → format → {"delta_loss", "delta_weight", "q"}. q is the loss of the Problem's choice."""

# Tied scores are separated by relative steps just above the resolution of 4 significant digits (1e-3 at most). Ties at
# 0 use the same steps of a number far below every other score, but above the 1e-15 that a solver keeps in order.
_TIE_STEP = 2e-3
_TIE_AT_ZERO = 1e-9


@dataclass(frozen=True)
class Option:
    """One choice to make."""

    linear: str
    gemm: Gemm | None  # the GEMM of the linear. None stands for its three GEMMs together
    stage: int
    # FLOPs in a training step, which four bits save of the budget. The wgrad of a frozen linear has none, and is no
    # item of a Problem
    flops: float
    # ``flops`` plus the option's part of those FLOPs of its stage that no choice covers. So Σ cost is all of the
    # decoder's linears, overall and on every stage: the denominator of the fp4 share
    cost: float
    pinned: Format | None  # format that a pin fixes

    @property
    def id(self) -> str:
        return option_id(self.linear, self.gemm)


def list_options(linears: Sequence[LinearRow], request: SolveRequest, tokens_per_step: int) -> list[Option]:
    """Return the options in the order of linears and GEMMs. Raises SnipError if a pin matches nothing."""
    if not linears:
        raise SnipError("the model has no linear that SNIP can choose formats for")
    gemms = tuple(Gemm) if request.granularity == "gemm" else (None,)
    names = [row.name for row in linears]
    pinned = pinned_formats(names, request.pins, request.granularity)
    flops = {(row, gemm): tokens_per_step * row.flops * row.runs(gemm) for row in linears for gemm in gemms}
    factors = _cost_factors([(row.stage, value) for (row, _), value in flops.items()], request)
    return [
        Option(row.name, gemm, row.stage, value, value * factors[row.stage], pinned.get(option_id(row.name, gemm)))
        for (row, gemm), value in flops.items()
    ]


def _cost_factors(flops: Sequence[tuple[int, float]], request: SolveRequest) -> dict[int, float]:
    """Return stage → (FLOPs of candidates + unquantised FLOPs) / FLOPs of candidates.

    Unquantised FLOPs of a stage without candidates are spread over all stages in proportion.
    """
    stages = sorted({stage for stage, _ in flops})
    candidates = {stage: math.fsum(f for s, f in flops if s == stage) for stage in stages}
    unquantised = request.unquantised_stage_flops or {}
    elsewhere = math.fsum(value for stage, value in unquantised.items() if stage not in candidates)
    spread = elsewhere / math.fsum(candidates.values())
    return {stage: 1.0 + float(unquantised.get(stage, 0.0)) / candidates[stage] + spread for stage in stages}


def check_reachable(
    linears: Sequence[LinearRow], request: SolveRequest, argument: str | None = None, *, tokens_per_step: int = 1
) -> None:
    """Raise SnipError, naming the highest reachable budget, if the budget of ``request`` cannot be reached.

    A bound on the loss is never refused here, because the reachable loss depends on scores. ``argument`` is what named
    the budget, if not ``--snip-budget``. ``tokens_per_step`` scales the FLOPs of the linears to those of
    ``unquantised_stage_flops``.
    """
    options = list_options(linears, request, tokens_per_step)
    zeros = np.zeros((len(options), len(request.formats)))
    # Raises an error for a format without a predicted time.
    problem = make_problem(options, dataclasses.replace(request, phases=None), zeros, zeros)
    if request.budget.kind != "loss" and (fault := infeasibility(problem)) is not None:
        unit = f" (seconds a step of the linears, by the times of {request.times.model})" if request.times else ""
        raise SnipError(
            f"{argument or '--snip-budget'} {request.budget} is unreachable with --snip-formats"
            f" {','.join(request.formats)}, the pins and the linears outside SNIP's choice: {fault.why}{unit}; lower"
            " the budget or remove a pin"
        )


def build_problem(table: StatisticsTable, request: SolveRequest) -> tuple[Problem, Scores]:
    """Return the Problem of one update, over ``request.phases`` if there are any, and the scores behind it.

    Raises SnipError if the policy, estimator, rule or a format is unknown, a pin or a phase's glob matches nothing, a
    phase has a budget of its own beside ``loss``, or the table holds a NaN or Inf (how-it-works.md, rules of a run:
    such an update is dropped).
    """
    broken = table.non_finite()
    if broken:
        raise SnipError(f"the statistics of step {table.step} are not finite: {', '.join(broken[:3])}")
    options = list_options(table.linears, request, table.tokens_per_step)
    delta_loss, delta_weight = divergences(table, request)
    scores = policy_scores(table, request, delta_loss, delta_weight)
    q = per_option(scores, request)
    if not np.all(np.isfinite(q)):
        raise SnipError(f"the scores of step {table.step} are not finite; the update is dropped")
    forward = per_option(np.where(np.arange(len(Gemm))[:, None] == FPROP, scores, 0.0), request)
    fprop_share = rounded(np.clip(np.divide(forward, q, out=np.zeros_like(q), where=q > 0.0), 0.0, 1.0))
    candidates = np.array([[fmt in request.formats_of(option.gemm) for fmt in request.formats] for option in options])
    q = _break_ties(monotone(q, request.formats, candidates), options, request)
    columns = {"delta_loss": per_option(delta_loss, request), "delta_weight": per_option(delta_weight, request), "q": q}
    record: Scores = {option.id: {} for option in options}
    for i, f in zip(*np.nonzero(candidates), strict=True):
        figures = {name: float(values[i, f]) for name, values in columns.items()}
        record[options[i].id][request.formats[f]] = figures
    return make_problem(options, request, q, fprop_share), record


def make_problem(
    options: Sequence[Option], request: SolveRequest, scores: FloatArray, fprop_share: FloatArray
) -> Problem:
    """Return the Problem of scored options, over ``request.phases`` if there are any.

    In a phase, an option of score q costs q · (s · standing + (1 − s) · carried), by the phase's weights. s is
    ``standing_share`` times the option's ``fprop_share``.

    Args:
        scores: float64 [options, formats of the request].
        fprop_share: part of each score that the option's fprop has, of the same shape. dgrad and wgrad have none.

    Raises SnipError if a glob of a phase's ``change`` matches no option, or the predicted times lack a format.
    """
    indices = [i for i, option in enumerate(options) if option.flops]
    solved, losses = [options[i] for i in indices], scores[indices, :, None]
    if (phases := request.phases) is None:
        items = [_item(option, request, row) for option, row in zip(solved, losses, strict=True)]
        return Problem(request.budget, tuple(items), request.tolerance)
    share = (request.standing_share * fprop_share[indices])[..., None]
    losses = losses * (share * np.array(phases.standing) + (1.0 - share) * np.array(phases.carried))
    rows = zip(solved, losses, _keeps(solved, phases), strict=True)
    spent = None
    if phases.spent_steps and request.budget.kind != "loss":  # rounding may lift a mean share above 1
        achieved = min(phases.spent, 1.0) if request.budget.kind == "fp4" else phases.spent
        spent = Spent(phases.spent_steps, achieved)
    return Problem(
        request.budget,
        tuple(_item(option, request, row, keeps) for option, row, keeps in rows),
        request.tolerance,
        phases=tuple(Phase(steps, target) for steps, target in zip(phases.steps, phases.budgets, strict=True)),
        spent=spent,
    )


def _break_ties(q: FloatArray, options: Sequence[Option], request: SolveRequest) -> FloatArray:
    """Return scores [options, formats] rounded, with equal scores *per FLOP* of four-bit formats separated.

    They are separated in one seeded order, which depends on the seed and the number of options alone, so that it is the
    same for every policy (README.md).
    """
    mean = np.mean([option.flops for option in options if option.flops])
    flops = np.array([option.flops or mean for option in options])
    size = flops / flops.mean()
    order = np.random.default_rng([request.seed % 2**64, 1]).permutation(len(options))
    for column in [c for c, fmt in enumerate(request.formats) if fmt in FOUR_BIT]:
        per_flop = q[:, column] / size
        equal, separate = rounded(per_flop), per_flop.copy()
        at_zero = _TIE_AT_ZERO * (float(np.abs(per_flop).max()) or 1.0)
        for value in np.unique(equal):
            group = order[equal[order] == value]
            if len(group) > 1:
                base = per_flop[group] if value else np.full(len(group), at_zero)
                separate[group] = base + np.abs(base) * _TIE_STEP * np.arange(len(group))
        q[:, column] = np.where(separate == per_flop, q[:, column], separate * size)
    return rounded(q)


def per_option(values: FloatArray, request: SolveRequest) -> FloatArray:
    """Return values [linears, 3, formats] as [options, formats]. At granularity ``layer`` GEMMs are summed."""
    if request.granularity == "layer":
        summed: FloatArray = values.sum(axis=1)
        return summed
    return values.reshape(-1, values.shape[-1])


def monotone(scores: FloatArray, formats: tuple[str, ...], candidate: NDArray[np.bool_] | None = None) -> FloatArray:
    """Raise scores [..., formats] so that fewer bits never score better than all formats of more bits.

    Measured or sampled scores may violate this (how-it-works.md, Q: one score per option). Formats of equal bits keep
    their order. ``candidate``, of the scores' shape, says which formats an option may take. The others limit nothing.
    """
    projected = scores.copy()
    floor = np.full(scores.shape[:-1], -np.inf)
    for bits in sorted({Format(f).bits for f in formats}, reverse=True):
        columns = [i for i, f in enumerate(formats) if Format(f).bits == bits]
        projected[..., columns] = np.maximum(projected[..., columns], floor[..., None])
        allowed = projected if candidate is None else np.where(candidate, projected, np.inf)
        least = allowed[..., columns].min(axis=-1)
        floor = np.where(np.isfinite(least), least, floor)
    return projected


def rounded(scores: FloatArray) -> FloatArray:
    """Round scores to 4 significant digits, so that layouts which differ in the last bits agree (how-it-works.md)."""
    # Decimal text gives the same double for the same digits; scaling by powers of ten does not.
    return np.array([float(f"{value:.3e}") for value in scores.ravel()], dtype=np.float64).reshape(scores.shape)


def _item(option: Option, request: SolveRequest, losses: FloatArray, keeps: tuple[int, ...] = ()) -> Item:
    """Return the item of an option: its cost, and saving and loss of every format it may take. A saving of time may be
    negative.

    ``losses`` are [formats of the request, phases]. A pinned format that is no candidate has the loss 0.
    """
    formats = (option.pinned,) if option.pinned else tuple(map(Format, request.formats_of(option.gemm)))
    cost, savings = option.cost, {fmt: option.flops if fmt in FOUR_BIT else 0.0 for fmt in formats}
    joint: dict[str, dict[Format, float]] = {}
    if request.budget.timed:
        if (times := request.times) is None:
            raise SnipError("speedup= and loss= need predicted times")
        cost = times.of(option.linear, option.gemm, Format.BF16.value)
        savings = {fmt: cost - times.of(option.linear, option.gemm, fmt.value) for fmt in formats}
        for other in SHARING if option.gemm is Gemm.WGRAD else ():  # GEMMs that share an operand with a wgrad
            seconds = {fmt: times.saved(option.linear, other, fmt.value) for fmt in formats}
            if saved := {fmt: second for fmt, second in seconds.items() if second > 0}:
                joint[option_id(option.linear, other)] = saved
    none = (0.0,) * losses.shape[1]
    by_format = dict(zip(request.formats, map(tuple, losses.tolist()), strict=True))
    choices = tuple(Choice(fmt, by_format.get(fmt.value, none), savings[fmt]) for fmt in formats)
    return Item(id=option.id, stage=option.stage, cost=cost, choices=choices, keeps=keeps, joint=joint)


def _keeps(options: Sequence[Option], phases: PhasedRequest) -> list[tuple[int, ...]]:
    """Return the phases in which each option keeps its format: those whose ``change`` does not match it."""
    keeps: list[tuple[int, ...]] = [()] * len(options)
    for p, globs in enumerate(phases.change):
        if p == 0 or globs is None:
            continue
        changes = [False] * len(options)
        for glob in globs:
            hits = [fnmatchcase(option.id, glob) or fnmatchcase(option.linear, glob) for option in options]
            if not any(hits):
                raise SnipError(
                    f"the phase that begins at step {phases.begins[p]}: change {quoted(cut(glob))} matches no option;"
                    f" the first option is {options[0].id}"
                )
            changes = [changed or other for changed, other in zip(changes, hits, strict=True)]
        keeps = [before if change else (*before, p) for before, change in zip(keeps, changes, strict=True)]
    return keeps
