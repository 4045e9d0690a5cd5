"""What is decided at once over time: the items of a group, in consecutive phases that keep one format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from snip_megatron.precision import Format
from snip_megatron.solver.phased.parts import PhasedChoice, PhasedItem


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision.

    Attributes:
        ids: ids of the items, sorted.
        phases: the first phase and the one behind the last.
        formats: what may be chosen. losses: their Σ loss over items and phases.
        savings: per stage, its number and Σ saving of every format, of one step; the same in all the phases.
    """

    ids: tuple[str, ...]
    phases: tuple[int, int]
    formats: tuple[Format, ...]
    losses: tuple[float, ...]
    savings: tuple[tuple[int, tuple[float, ...]], ...]


def list_decisions(items: Sequence[PhasedItem], phases: int) -> list[Decision]:
    """Decisions in the order of their first ids, and of time."""
    units: list[list[PhasedItem]] = []
    groups: dict[str, list[PhasedItem]] = {}
    for item in sorted(items, key=lambda item: item.id):
        if item.group is None:
            units.append([item])
        elif item.group in groups:
            groups[item.group].append(item)
        else:
            groups[item.group] = [item]
            units.append(groups[item.group])
    return [decision for unit in units for decision in _of_unit(unit, phases)]


def _of_unit(members: list[PhasedItem], phases: int) -> list[Decision]:
    formats = _shared_formats(members)
    by_format = [{c.format: c for c in item.choices} for item in members]
    ids = tuple(item.id for item in members)
    stages = {item.stage: [i for i, m in enumerate(members) if m.stage == item.stage] for item in members}
    savings = tuple(
        (stage, tuple(_sum([by_format[i][f].saving for i in own]) for f in formats)) for stage, own in stages.items()
    )
    keeps = {p for item in members for p in item.keeps}
    begins = [p for p in range(phases) if p not in keeps]
    return [
        Decision(
            ids, (a, b), formats, tuple(_losses([known[f] for known in by_format], a, b) for f in formats), savings
        )
        for a, b in zip(begins, [*begins[1:], phases], strict=True)
    ]


def _losses(choices: list[PhasedChoice], first: int, last: int) -> float:
    return _sum([loss for choice in choices for loss in choice.losses[first:last]])


def _sum(values: list[float]) -> float:
    return values[0] if len(values) == 1 else math.fsum(values)


def _shared_formats(members: list[PhasedItem]) -> tuple[Format, ...]:
    """Formats that every item may take; only the pinned one if an item is pinned."""
    pins = {item.pin for item in members if item.pin is not None}
    shared = [c.format for c in members[0].choices if not pins or c.format in pins]
    for item in members[1:]:
        own = {c.format for c in item.choices}
        shared = [f for f in shared if f in own]
    return tuple(shared)
