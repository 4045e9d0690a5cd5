"""Validation of a problem. Faults are named by their JSON path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from snip_megatron.errors import quoted
from snip_megatron.precision import Format
from snip_megatron.precision.budget import MAX_LOSS, MAX_SPEEDUP
from snip_megatron.solver.items import KINDS, Budget, Item

MAX_COST = 1e18
MAX_STAGE = 2**20
_ROUNDING = 1e-9  # a saving may pass its cost by this share: both are sums rounded to float64


def faults(budget: Budget, items: Sequence[Item]) -> Iterator[tuple[str, str]]:
    """Yield (JSON path, what is wrong) for each fault, in order."""
    yield from budget_faults(budget)
    if not items:
        yield "items", "must hold at least one item"
    seen: dict[str, int] = {}
    groups: dict[str, list[Item]] = {}
    for i, item in enumerate(items):
        if not item.id:
            yield f"items[{i}].id", "must be a non-empty string"
        first = seen.setdefault(item.id, i)
        if first != i:
            yield f"items[{i}].id", f"{quoted(item.id)} is also the id of items[{first}]"
        if not 0 <= item.stage < MAX_STAGE:
            yield f"items[{i}].stage", f"must be a stage number from 0 to {MAX_STAGE - 1}, got {quoted(item.stage)}"
        if not 0 <= item.cost <= MAX_COST:
            yield f"items[{i}].cost", f"must be a finite number from 0 to {MAX_COST:g}, got {item.cost}"
        yield from _choice_faults(item, f"items[{i}].choices")
        if item.group is not None:
            groups.setdefault(item.group, []).append(item)
            if not item.group:
                yield f"items[{i}].group", "must be a non-empty string or absent"
        if item.pin is not None and item.pin not in _formats(item):
            yield f"items[{i}].pin", f"{quoted(item.pin.value)} is not among the item's choices"
    for name, members in groups.items():
        yield from _unity_faults(name, members)


def budget_faults(budget: Budget) -> Iterator[tuple[str, str]]:
    """Yield (JSON path, what is wrong) for each fault of a budget."""
    given = [kind for kind in KINDS if getattr(budget, kind) is not None]
    if len(given) != 1:
        yield "budget", f"must have exactly one of {', '.join(KINDS)}, has {' and '.join(given) or 'none'}"
    if budget.target is not None and not 0 <= budget.target <= 1:
        yield "budget.target", f"must be a share from 0 to 1, got {budget.target}"
    if budget.speedup is not None and not 1 <= budget.speedup <= MAX_SPEEDUP:
        yield "budget.speedup", f"must be a factor from 1 to {MAX_SPEEDUP:g}, got {budget.speedup}"
    if budget.loss is not None and not abs(budget.loss) <= MAX_LOSS:
        yield "budget.loss", f"must be a number from {-MAX_LOSS:g} to {MAX_LOSS:g}, got {budget.loss}"
    if budget.stage_tolerance is not None:
        if budget.target is None:
            yield "budget.stage_tolerance", f"has no meaning beside {budget.kind}: a stage's time is what counts there"
        if not 0 <= budget.stage_tolerance <= 1:
            yield "budget.stage_tolerance", f"must be null or a share from 0 to 1, got {budget.stage_tolerance}"
    if budget.fixed_cost and budget.target is not None:
        yield "budget.fixed_cost", "has no meaning beside target"
    for stage, cost in budget.fixed_cost:
        if not 0 <= cost <= MAX_COST:
            yield f"budget.fixed_cost.{stage}", f"must be a finite number from 0 to {MAX_COST:g}, got {cost}"


def _choice_faults(item: Item, path: str) -> Iterator[tuple[str, str]]:
    if not item.choices:
        yield path, "must hold at least one choice"
    for j, choice in enumerate(item.choices):
        if not abs(choice.loss) <= MAX_LOSS:
            yield f"{path}[{j}].loss", f"must be a finite number of at most {MAX_LOSS:g}, got {choice.loss}"
        if not math.isfinite(choice.saving) or choice.saving > item.cost * (1 + _ROUNDING):
            yield f"{path}[{j}].saving", f"must be a finite number of at most the item's cost, got {choice.saving}"
        if choice.saving < -MAX_COST:
            yield f"{path}[{j}].saving", f"must be at least {-MAX_COST:g}, got {choice.saving}"
    formats = _formats(item)
    if len(set(formats)) != len(formats):
        j = next(j for j, f in enumerate(formats) if f in formats[:j])
        yield f"{path}[{j}].format", f"{quoted(formats[j].value)} stands twice in one item"


def _unity_faults(name: str, members: list[Item]) -> Iterator[tuple[str, str]]:
    """Yield a fault if no format is allowed for all members of a group."""
    shared = set(_formats(members[0])).intersection(*(_formats(item) for item in members))
    pins = {item.pin for item in members if item.pin is not None}
    if not shared:
        yield "items", f"group {quoted(name)}: its {len(members)} items have no format in common"
    elif len(pins) > 1:
        yield "items", f"group {quoted(name)}: pinned to {' and '.join(sorted(p.value for p in pins))}"
    elif not pins <= shared:
        yield "items", f"group {quoted(name)}: pinned to {next(iter(pins)).value}, which not all its items may take"


def _formats(item: Item) -> list[Format]:
    return [choice.format for choice in item.choices]
