"""What makes a phased problem wrong, by JSON path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from snip_megatron.precision.budget import MAX_LOSS, MAX_SPEEDUP
from snip_megatron.precision.phases import MOST_PHASES
from snip_megatron.solver.items import Budget, Choice, Item
from snip_megatron.solver.phased.parts import Phase, PhasedItem, Spent
from snip_megatron.solver.validation import faults

MAX_STEPS = 10**12


def phased_faults(
    budget: Budget, phases: Sequence[Phase], items: Sequence[PhasedItem], spent: Spent | None
) -> Iterator[tuple[str, str]]:
    """(JSON path, what is wrong), first fault first."""
    if not 1 <= len(phases) <= MOST_PHASES:
        yield "phases", f"must hold 1 to {MOST_PHASES} phases, got {len(phases)}"
    for p, phase in enumerate(phases):
        yield from _phase_faults(budget, phase, f"phases[{p}]")
    if spent is not None:
        yield from _spent_faults(budget, spent)
    for i, item in enumerate(items):
        yield from _item_faults(item, len(phases), f"items[{i}]")
    yield from faults(budget, [_static(item) for item in items])


def _phase_faults(budget: Budget, phase: Phase, path: str) -> Iterator[tuple[str, str]]:
    if not 1 <= phase.steps <= MAX_STEPS:
        yield f"{path}.steps", f"must be a number of steps from 1 to {MAX_STEPS:g}, got {phase.steps}"
    if phase.target is not None:
        if budget.kind == "loss":
            yield f"{path}.target", "has no meaning beside loss: what remains is made as fast as the bound allows"
        if budget.kind == "target" and not 0 <= phase.target <= 1:
            yield f"{path}.target", f"must be a share from 0 to 1, got {phase.target}"
        if budget.kind == "speedup" and not 1 <= phase.target <= MAX_SPEEDUP:
            yield f"{path}.target", f"must be a factor from 1 to {MAX_SPEEDUP:g}, got {phase.target}"


def _spent_faults(budget: Budget, spent: Spent) -> Iterator[tuple[str, str]]:
    if budget.kind == "loss":
        yield "spent", "has no meaning beside loss: what remains is made as fast as the bound allows"
    if not 0 <= spent.steps <= MAX_STEPS:
        yield "spent.steps", f"must be a number of steps from 0 to {MAX_STEPS:g}, got {spent.steps}"
    if budget.kind == "speedup" and not (math.isfinite(spent.achieved) and spent.achieved > 0):
        yield "spent.achieved", f"must be a factor above 0, got {spent.achieved}"
    if budget.kind == "target" and not 0 <= spent.achieved <= 1:
        yield "spent.achieved", f"must be a share from 0 to 1, got {spent.achieved}"


def _item_faults(item: PhasedItem, phases: int, path: str) -> Iterator[tuple[str, str]]:
    if not all(1 <= p < phases for p in item.keeps) or len(set(item.keeps)) != len(item.keeps):
        yield f"{path}.keeps", f"must hold distinct indices of phases that follow another, from 1 to {phases - 1}"
    for j, choice in enumerate(item.choices):
        if len(choice.losses) != phases:
            yield f"{path}.choices[{j}].losses", f"must hold {phases} numbers, one a phase, got {len(choice.losses)}"
        for p, loss in enumerate(choice.losses):
            if not abs(loss) <= MAX_LOSS:
                here = f"{path}.choices[{j}].losses[{p}]"
                yield here, f"must be a finite number of at most {MAX_LOSS:g}, got {loss}"


def _static(item: PhasedItem) -> Item:
    """The item without its losses, which are checked already."""
    choices = tuple(Choice(choice.format, 0.0, choice.saving) for choice in item.choices)
    return Item(item.id, item.stage, item.cost, choices, item.group, item.pin)
