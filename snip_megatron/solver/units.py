"""Units of decision: an item, or the items of a group, with pins applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from snip_megatron.precision import Format
from snip_megatron.solver.items import Item


@dataclass(frozen=True, slots=True)
class Unit:
    """One decision. ``losses`` and ``savings`` belong to ``formats``. All figures are sums over the items ``ids``."""

    ids: tuple[str, ...]
    stage: int
    cost: float
    formats: tuple[Format, ...]
    losses: tuple[float, ...]
    savings: tuple[float, ...]


def decision_units(items: Sequence[Item]) -> list[Unit]:
    """Return the units in the order of their first ids. Ids are sorted within a unit.

    A unit lies on one stage. A group on several stages has a unit on each, which is a relaxation (see ``spanning``).
    """
    members: dict[str, list[Item]] = {}
    units = []
    for item in sorted(items, key=lambda item: item.id):
        if item.group is None:
            units.append(_alone(item))
        else:
            members.setdefault(item.group, []).append(item)
    if members:
        units += [unit for group in members.values() for unit in _together(group)]
        units.sort(key=lambda unit: unit.ids[0])
    return units


def _alone(item: Item) -> Unit:
    choices = item.choices if item.pin is None else tuple(c for c in item.choices if c.format is item.pin)
    return Unit(
        (item.id,),
        item.stage,
        item.cost,
        tuple([c.format for c in choices]),
        tuple([c.loss for c in choices]),
        tuple([c.saving for c in choices]),
    )


def _together(items: list[Item]) -> list[Unit]:
    """Return the units of a group, one for each stage, with the formats that all its items may take and pins allow."""
    shared = [c.format for c in items[0].choices]
    pins = {item.pin for item in items if item.pin is not None}
    for item in items:
        own = {c.format for c in item.choices}
        shared = [f for f in shared if f in own and (not pins or f in pins)]
    stages = dict.fromkeys(item.stage for item in items)
    return [_unit([item for item in items if item.stage == stage], tuple(shared)) for stage in stages]


def _unit(items: list[Item], formats: tuple[Format, ...]) -> Unit:
    by_format = [{c.format: c for c in item.choices} for item in items]
    return Unit(
        tuple(item.id for item in items),
        items[0].stage,
        math.fsum(item.cost for item in items),
        formats,
        tuple(math.fsum(known[f].loss for known in by_format) for f in formats),
        tuple(math.fsum(known[f].saving for known in by_format) for f in formats),
    )
