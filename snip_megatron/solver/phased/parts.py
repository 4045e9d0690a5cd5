"""What a phased problem consists of, beside its budget."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.precision import Format


@dataclass(frozen=True, slots=True)
class PhasedChoice:
    """One format an item may run in.

    Attributes:
        format: the number format.
        saving: what it saves in one step, in the unit of the item's cost.
        losses: what it costs in quality in every phase, all of the phase's steps together.
    """

    format: Format
    saving: float
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PhasedItem:
    """One decision a phase.

    Attributes:
        id, stage, cost, group, pin: as of an ``Item``; the cost is that of one step.
        choices: at least one, each format once.
        keeps: indices of the phases, from 1 on, in which the item keeps the preceding phase's format. Items of a group
            keep theirs where one of them does.
    """

    id: str
    stage: int
    cost: float
    choices: tuple[PhasedChoice, ...]
    group: str | None = None
    pin: Format | None = None
    keeps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of what remains of a run.

    Attributes:
        steps: number of training steps, 1 or more.
        target: the least effective share of this phase itself, under a ``speedup`` budget its least speedup; None: only
            the average counts.
    """

    steps: int
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What is over of a run.

    Attributes:
        steps: number of training steps.
        achieved: mean share of these steps; under a ``speedup`` budget their speedup, the harmonic mean.
    """

    steps: int
    achieved: float
