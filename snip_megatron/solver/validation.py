"""Validation of a problem. Faults are named by their JSON path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snip_megatron.errors import quoted
from snip_megatron.precision.budget import BUDGETS, MAX_LOSS, MAX_SPEEDUP, Budget
from snip_megatron.precision.phases import MOST_PHASES
from snip_megatron.solver.items import Item, Phase, Spent

if TYPE_CHECKING:
    from snip_megatron.solver.problem import Problem

MAX_COST = 1e18
MAX_STAGE = 2**20
MAX_STEPS = 10**12
_ROUNDING = 1e-9  # a saving may pass its cost by this share: both are sums rounded to float64
Faults = Iterator[tuple[str, str]]
"""(JSON path, what is wrong), in order."""


def faults(problem: Problem) -> Faults:
    """Yield each fault of a problem."""
    phases, spent = problem.phases, problem.spent
    yield from _budget_faults(problem)
    if len(phases) > MOST_PHASES:
        yield "phases", f"must hold 1 to {MOST_PHASES} phases, got {len(phases)}"
    for p, phase in enumerate(phases):
        yield from _phase_faults(problem.budget, phase, f"phases[{p}]")
    if spent is not None:
        yield from _spent_faults(problem.budget, spent)
    if not problem.items:
        yield "items", "must hold at least one item"
    seen: dict[str, int] = {}
    for i, item in enumerate(problem.items):
        if not item.id:
            yield f"items[{i}].id", "must be a non-empty string"
        first = seen.setdefault(item.id, i)
        if first != i:
            yield f"items[{i}].id", f"{quoted(item.id)} is also the id of items[{first}]"
        yield from _item_faults(item, len(phases), f"items[{i}]")


def _budget_faults(problem: Problem) -> Faults:
    kind, tolerance = problem.budget.kind, problem.stage_tolerance
    if kind not in BUDGETS:
        yield "budget", f"must be one of {', '.join(BUDGETS)}, got {kind}"
    if tolerance is not None and kind != "fp4":
        yield "budget.stage_tolerance", f"has no meaning beside {kind}: a stage's time is what counts there"
    if tolerance is not None and not 0 <= tolerance <= 1:
        yield "budget.stage_tolerance", f"must be null or a share from 0 to 1, got {tolerance}"
    if problem.fixed_cost and kind == "fp4":
        yield "budget.fixed_cost", "has no meaning beside target"
    for stage, cost in problem.fixed_cost:
        if not 0 <= cost <= MAX_COST:
            yield f"budget.fixed_cost.{stage}", f"must be a finite number from 0 to {MAX_COST:g}, got {cost}"


def _phase_faults(budget: Budget, phase: Phase, path: str) -> Faults:
    if not 1 <= phase.steps <= MAX_STEPS:
        yield f"{path}.steps", f"must be a number of steps from 1 to {MAX_STEPS:g}, got {phase.steps}"
    if phase.target is not None:
        if budget.kind == "loss":
            yield f"{path}.target", "has no meaning beside loss: what remains is made as fast as the bound allows"
        if budget.kind == "fp4" and not 0 <= phase.target <= 1:
            yield f"{path}.target", f"must be a share from 0 to 1, got {phase.target}"
        if budget.kind == "speedup" and not 1 <= phase.target <= MAX_SPEEDUP:
            yield f"{path}.target", f"must be a factor from 1 to {MAX_SPEEDUP:g}, got {phase.target}"


def _spent_faults(budget: Budget, spent: Spent) -> Faults:
    if budget.kind == "loss":
        yield "spent", "has no meaning beside loss: what remains is made as fast as the bound allows"
    if not 0 <= spent.steps <= MAX_STEPS:
        yield "spent.steps", f"must be a number of steps from 0 to {MAX_STEPS:g}, got {spent.steps}"
    if budget.kind == "speedup" and not (math.isfinite(spent.achieved) and spent.achieved > 0):
        yield "spent.achieved", f"must be a factor above 0, got {spent.achieved}"
    if budget.kind == "fp4" and not 0 <= spent.achieved <= 1:
        yield "spent.achieved", f"must be a share from 0 to 1, got {spent.achieved}"


def _item_faults(item: Item, phases: int, path: str) -> Faults:
    if not 0 <= item.stage < MAX_STAGE:
        yield f"{path}.stage", f"must be a stage number from 0 to {MAX_STAGE - 1}, got {quoted(item.stage)}"
    if not 0 <= item.cost <= MAX_COST:
        yield f"{path}.cost", f"must be a finite number from 0 to {MAX_COST:g}, got {item.cost}"
    if not item.choices:
        yield f"{path}.choices", "must hold at least one choice"
    for j, choice in enumerate(item.choices):
        here = f"{path}.choices[{j}]"
        if len(choice.losses) != (phases or 1):
            yield f"{here}.losses", f"must hold {phases or 1} numbers, one a phase, got {len(choice.losses)}"
        for p, loss in enumerate(choice.losses):
            if not abs(loss) <= MAX_LOSS:
                name = f"{here}.losses[{p}]" if phases else f"{here}.loss"
                yield name, f"must be a finite number of at most {MAX_LOSS:g}, got {loss}"
        if not math.isfinite(choice.saving) or choice.saving > item.cost * (1 + _ROUNDING):
            yield f"{here}.saving", f"must be a finite number of at most the item's cost, got {choice.saving}"
        if choice.saving < -MAX_COST:
            yield f"{here}.saving", f"must be at least {-MAX_COST:g}, got {choice.saving}"
    formats = [choice.format for choice in item.choices]
    if len(set(formats)) != len(formats):
        j = next(j for j, f in enumerate(formats) if f in formats[:j])
        yield f"{path}.choices[{j}].format", f"{quoted(formats[j].value)} stands twice in one item"
    if item.pin is not None and item.pin not in formats:
        yield f"{path}.pin", f"{quoted(item.pin.value)} is not among the item's choices"
    if not all(1 <= p < phases for p in item.keeps) or len(set(item.keeps)) != len(item.keeps):
        yield f"{path}.keeps", f"must hold distinct indices of phases that follow another, from 1 to {phases - 1}"
