"""Which option is forced in which microbatch pass of a measurement (METHOD, estimator ``measured``).

A *trial* forces one thing. It takes two passes of each microbatch: with the option on and the loss times +1, then with
it off and the loss times −1, so that ``main_grad`` is left with the difference. Trials follow each other without a
pause: one pipelined call carries them all. Plain Python, no torch.

Two facts keep trials few. An error of wgrad touches its own weight's gradient only, so the wgrads of all linears are
forced at once. Rounding noise depends on where it starts and hardly on how, so a layer has one nudge for its fprops and
one for its dgrads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from snip_megatron.precision import Format, Gemm, LinearId

IDLE = -1
"""Trial of a pass that only fills the schedule up."""


@dataclass(frozen=True, order=True)
class Unit:
    """What is renewed together: one GEMM, fprop or dgrad, of the four linears of a layer, in every format."""

    layer: int
    gemm: Gemm


@dataclass(frozen=True)
class Trial:
    """One thing forced.

    Attributes:
        gemm: of the option.
        linears: global names: one; or, for wgrad, all.
        format: None for a nudge.
    """

    gemm: Gemm
    linears: tuple[str, ...]
    format: Format | None

    @property
    def layer(self) -> int:
        """Of the (first) linear."""
        return LinearId.parse(self.linears[0]).layer

    def reaches(self, layer: int, *, linear: bool) -> bool:
        """Whether the gradient of a parameter of ``layer`` can change.

        ``linear`` False: of a norm or the embedding (layer 0; the final norm belongs to the layer after the last).
        """
        if self.gemm is Gemm.WGRAD:
            return linear
        return self.gemm is Gemm.FPROP or layer <= self.layer


@dataclass(frozen=True)
class Slot:
    """One microbatch pass: trial, microbatch, and what the loss is multiplied by (+1 on, −1 off, 0 idle)."""

    trial: int
    microbatch: int
    sign: int


@dataclass(frozen=True)
class Schedule:
    """All passes of a measurement on a data parallel rank, in order.

    Attributes:
        trials: what is forced.
        microbatches: numbers of the microbatches that every trial sees.
        multiple_of: an interleaved pipeline takes whole groups of passes.
    """

    trials: tuple[Trial, ...]
    microbatches: tuple[int, ...]
    multiple_of: int = 1

    @property
    def passes_a_trial(self) -> int:
        """Two a microbatch."""
        return 2 * len(self.microbatches)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """In the order of execution."""
        slots = [
            Slot(trial, microbatch, sign)
            for trial in range(len(self.trials))
            for microbatch in self.microbatches
            for sign in (1, -1)
        ]
        idle = -len(slots) % self.multiple_of
        return (*slots, *[Slot(IDLE, self.microbatches[0], 0)] * idle)


def all_units(names: Sequence[str]) -> list[Unit]:
    """Every unit of a model with these linears, in order."""
    layers = sorted({LinearId.parse(name).layer for name in names})
    return [Unit(layer, gemm) for layer in layers for gemm in (Gemm.FPROP, Gemm.DGRAD)]


def choose_units(measured_at: Mapping[Unit, float], share: float, seed: int) -> list[Unit]:
    """The units to renew now: the longest unmeasured first, equals in one seeded order; in network order.

    Args:
        measured_at: unit → step it was measured at, negative for never. A function of this and the arguments alone, so
            that a resumed run chooses what the uninterrupted one would.
        share: of the units, rounded up.
        seed: of the order.
    """
    units = sorted(measured_at)
    order = list(range(len(units)))
    random.Random(seed).shuffle(order)
    rank = dict(zip(units, order, strict=True))
    oldest = sorted(units, key=lambda unit: (measured_at[unit], rank[unit]))
    return sorted(oldest[: math.ceil(share * len(units))])


def plan_trials(
    names: Sequence[str], formats: Sequence[str], units: Sequence[Unit], skip: Collection[tuple[str, Gemm]] = ()
) -> tuple[Trial, ...]:
    """Trials of ``units``, a nudge each among them, and of every wgrad.

    Args:
        names: of all linears, in global order.
        formats: to measure.
        units: to measure.
        skip: options nobody asks for (pinned ones). A unit without any other is left out, nudge included.
    """
    skipped = set(skip)
    trials: list[Trial] = []
    for unit in units:
        members = [name for name in names if LinearId.parse(name).layer == unit.layer]
        wanted = [name for name in members if (name, unit.gemm) not in skipped]
        if not wanted:
            continue
        # Where noise starts that passes through the whole layer: below it going forward, above it going backward.
        start = members[0] if unit.gemm is Gemm.FPROP else members[-1]
        trials.append(Trial(unit.gemm, (start,), None))
        trials += [Trial(unit.gemm, (name,), Format(fmt)) for name in wanted for fmt in formats]
    weights = tuple(name for name in names if (name, Gemm.WGRAD) not in skipped)
    return (*trials, *(Trial(Gemm.WGRAD, weights, Format(fmt)) for fmt in formats if weights))
