"""Builds the problem over the phases of a run from statistics and a request with phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from snip_megatron.errors import SnipError, cut, quoted
from snip_megatron.precision import split_option_id
from snip_megatron.sensitivity.phased import PhasedRequest
from snip_megatron.sensitivity.problem import Scores, make_item, score_options
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.solver.items import Choice, Item, Phase, Spent
from snip_megatron.solver.problem import Problem
from snip_megatron.statistics.table import StatisticsTable


def build_phased_problem(table: StatisticsTable, request: SolveRequest) -> tuple[Problem, Scores]:
    """Return the problem of one update over ``request.phases``, and the scores behind it.

    The loss of an option in a phase is q · (s · standing + (1 − s) · carried), with the phase's weights; s is
    ``request.standing_share`` times the part of q that the option's fprop has. dgrad and wgrad have no standing part.

    Raises:
        SnipError: as ``build_problem``; a glob of ``change`` matches no option; or a phase has a budget of its own
            beside ``loss``.
    """
    phases = request.phases
    if phases is None:
        raise SnipError("the request names no phases")
    options, scores, forward = score_options(table, request)
    items = [make_item(option, request, scores[option.id]) for option in options]
    parts = [dict(zip(request.formats, each, strict=True)) for each in forward.tolist()]
    remaining = tuple(Phase(steps, target) for steps, target in zip(phases.steps, phases.budgets, strict=True))
    phased = phased_items(items, parts, phases, request.standing_share)
    return Problem(request.budget, phased, request.tolerance, phases=remaining, spent=_spent(request, phases)), scores


def phased_items(
    items: Sequence[Item], forward: Sequence[Mapping[str, float]], phases: PhasedRequest, standing_share: float
) -> tuple[Item, ...]:
    """Return items whose losses are those of every phase.

    Args:
        items: items whose losses are those of a whole run.
        forward: by item, format → the part of the loss that the item's fprop has; 0 for formats that are not named.
        phases: the phases.
        standing_share: share of an fprop's loss that a later precise phase removes at once.

    Raises:
        SnipError: a glob of ``change`` matches no item.
    """
    keeps = _keeps([item.id for item in items], phases)
    each = zip(items, forward, keeps, strict=True)
    return tuple(_phased_item(item, parts, phases, standing_share, kept) for item, parts, kept in each)


def _phased_item(
    item: Item, parts: Mapping[str, float], phases: PhasedRequest, standing_share: float, keeps: tuple[int, ...]
) -> Item:
    choices = []
    for choice in item.choices:
        share = standing_share * parts.get(choice.format.value, 0.0)
        weights = [
            share * stands + (1.0 - share) * carries
            for stands, carries in zip(phases.standing, phases.carried, strict=True)
        ]
        choices.append(Choice(choice.format, tuple(choice.loss * w for w in weights), choice.saving))
    return replace(item, choices=tuple(choices), keeps=keeps)


def _keeps(ids: Sequence[str], phases: PhasedRequest) -> list[tuple[int, ...]]:
    """Return the phases in which each option keeps its format: those whose ``change`` does not match it."""
    kept: list[list[int]] = [[] for _ in ids]
    for p, globs in enumerate(phases.change):
        if p == 0 or globs is None:
            continue
        matched: set[str] = set()
        for i, option in enumerate(ids):
            linear = str(split_option_id(option)[0])
            hits = {glob for glob in globs if fnmatchcase(option, glob) or fnmatchcase(linear, glob)}
            matched |= hits
            if not hits:
                kept[i].append(p)
        idle = [glob for glob in globs if glob not in matched]
        if idle:
            raise SnipError(
                f"the phase that begins at step {phases.begins[p]}: change {quoted(cut(idle[0]))} matches no option;"
                f" the first option is {ids[0]}"
            )
    return [tuple(each) for each in kept]


def _spent(request: SolveRequest, phases: PhasedRequest) -> Spent | None:
    """Return the past steps and their average, or None.

    A bound on the loss has no average. Shares are limited to 1, which rounding may exceed.
    """
    if not phases.spent_steps or request.budget.kind == "loss":
        return None
    achieved = min(phases.spent, 1.0) if request.budget.kind == "fp4" else phases.spent
    return Spent(phases.spent_steps, achieved)
