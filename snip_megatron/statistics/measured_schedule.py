"""Which option is forced in which microbatch pass of a measurement (docs/method.md, estimator ``measured``).

A *trial* forces one option. It takes two passes of each microbatch: one with the option and the loss times +1, one
without it and the loss times −1, so that ``main_grad`` holds the difference. One pipelined call runs all trials,
without a pause between them. Plain Python, no torch.

Two facts keep the number of trials small. An error of wgrad changes the gradient of its own weight only, so the wgrads
of all linears are forced at once. And rounding noise depends on where it starts and hardly on how. So one *nudge*, a
change below a rounding step, measures the noise of all fprops of a layer, and another one that of all its dgrads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from snip_megatron.precision import Format, Gemm, LinearId

IDLE = -1
"""Trial of a pass that only pads the schedule."""


@dataclass(frozen=True, order=True)
class Unit:
    """The options that are renewed together: one GEMM, fprop or dgrad, of all linears of a layer, in every format."""

    layer: int
    gemm: Gemm


@dataclass(frozen=True)
class Trial:
    """One forced option.

    Attributes:
        gemm: GEMM of the option.
        linears: global names: one linear, or all of them for wgrad.
        format: format of the option; None for a nudge.
    """

    gemm: Gemm
    linears: tuple[str, ...]
    format: Format | None

    @property
    def layer(self) -> int:
        """Layer of the (first) linear."""
        return LinearId.parse(self.linears[0]).layer

    def reaches(self, layer: int, *, linear: bool) -> bool:
        """Whether the gradient of a parameter of ``layer`` can change.

        Args:
            layer: layer of the parameter. The embedding has layer 0, the final norm the layer after the last.
            linear: whether the parameter is a linear's weight, not a norm or the embedding.
        """
        if self.gemm is Gemm.WGRAD:
            return linear
        return self.gemm is Gemm.FPROP or layer <= self.layer


@dataclass(frozen=True)
class Slot:
    """One microbatch pass.

    Attributes:
        trial: index of the trial, or IDLE.
        microbatch: number of the microbatch.
        sign: factor of the loss: +1 with the option, −1 without it, 0 if idle.
    """

    trial: int
    microbatch: int
    sign: int


@dataclass(frozen=True)
class Schedule:
    """All passes of a measurement on a data parallel rank, in order.

    Attributes:
        trials: the trials.
        microbatches: numbers of the microbatches that every trial uses.
        multiple_of: the number of passes is padded to a multiple of this, as an interleaved pipeline requires.
    """

    trials: tuple[Trial, ...]
    microbatches: tuple[int, ...]
    multiple_of: int = 1

    @property
    def passes_a_trial(self) -> int:
        """Passes of one trial: two for each microbatch."""
        return 2 * len(self.microbatches)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The passes in the order of execution."""
        slots = [
            Slot(trial, microbatch, sign)
            for trial in range(len(self.trials))
            for microbatch in self.microbatches
            for sign in (1, -1)
        ]
        idle = -len(slots) % self.multiple_of
        return (*slots, *[Slot(IDLE, self.microbatches[0], 0)] * idle)


def all_units(names: Sequence[str]) -> list[Unit]:
    """Return every unit of a model with these linears, in order."""
    layers = sorted({LinearId.parse(name).layer for name in names})
    return [Unit(layer, gemm) for layer in layers for gemm in (Gemm.FPROP, Gemm.DGRAD)]


def choose_units(measured_at: Mapping[Unit, float], share: float, seed: int) -> list[Unit]:
    """Choose the units to renew now: those that were measured longest ago, ties in one seeded order.

    The result depends on the arguments alone, so a resumed run chooses what the uninterrupted run would.

    Args:
        measured_at: unit → step at which it was measured, negative for never.
        share: share of the units to renew, rounded up.
        seed: seed of the order of ties.

    Returns:
        The units in network order.
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
    """Return the trials of ``units``, each with a nudge, and of every wgrad.

    Args:
        names: all linears, in global order.
        formats: formats to measure.
        units: units to measure.
        skip: options that need no measurement because they are pinned. A unit with no other option is left out with its
            nudge.
    """
    skipped = set(skip)
    trials: list[Trial] = []
    for unit in units:
        members = [name for name in names if LinearId.parse(name).layer == unit.layer]
        wanted = [name for name in members if (name, unit.gemm) not in skipped]
        if not wanted:
            continue
        # The noise passes through the whole layer: it starts at the first linear in fprop, at the last one in dgrad.
        start = members[0] if unit.gemm is Gemm.FPROP else members[-1]
        trials.append(Trial(unit.gemm, (start,), None))
        own = [Format(fmt) for fmt in formats if unit.gemm in Format(fmt).gemms]
        trials += [Trial(unit.gemm, (name,), fmt) for name in wanted for fmt in own]
    weights = tuple(name for name in names if (name, Gemm.WGRAD) not in skipped)
    own = [Format(fmt) for fmt in formats if Gemm.WGRAD in Format(fmt).gemms]
    return (*trials, *(Trial(Gemm.WGRAD, weights, fmt) for fmt in own if weights))
