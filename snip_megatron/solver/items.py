"""The parts of a problem: items with a choice of formats, and phases."""

from __future__ import annotations

import math
from dataclasses import dataclass

from snip_megatron.precision import Format
from snip_megatron.precision.fields import JsonFields


@dataclass(frozen=True, slots=True)
class Choice(JsonFields):
    """One format that an item may run in.

    Attributes:
        format: the number format.
        losses: the loss of quality in any unit, which may be negative: one number, or one for each phase, all of the
            phase's steps together.
        saving: the part of the item's cost that the format saves in a step. It is negative if the format is slower than
            the reference.
    """

    format: Format
    losses: tuple[float, ...]
    saving: float

    @property
    def loss(self) -> float:
        """Σ of the losses."""
        return self.losses[0] if len(self.losses) == 1 else math.fsum(self.losses)


@dataclass(frozen=True, slots=True)
class Item(JsonFields):
    """What gets one format in each phase: a GEMM (granularity ``gemm``) or a whole linear (``layer``).

    Attributes:
        id: unique non-empty text. A training run uses names such as ``decoder.layers.0.mlp.linear_fc1:fprop``.
        stage: pipeline stage. All chunks of a virtual pipeline have the same stage.
        cost: FLOPs or seconds of a step in the reference format, at most 1e18.
        choices: at least one; each format at most once.
        pin: the format that the item must take, one of its choices. None: any choice.
        keeps: indices of the phases, from 1 on, in which the item keeps the preceding phase's format.
    """

    id: str
    stage: int
    cost: float
    choices: tuple[Choice, ...]
    pin: Format | None = None
    keeps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase(JsonFields):
    """One phase of what remains of a run.

    ``target`` is the share that this phase itself must reach, or under a ``speedup`` budget its speedup. None: only the
    average counts.
    """

    steps: int
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Spent(JsonFields):
    """The part of a run that is over, and its mean share; under a ``speedup`` budget its speedup, the harmonic mean."""

    steps: int
    achieved: float
