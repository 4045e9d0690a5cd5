"""What the past steps of a run count towards the average over the run in a budget with phases."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.precision import PrecisionMap


@dataclass
class BudgetSpent:
    """What a run has spent, equal on all ranks.

    Attributes:
        origin: the first step of the run under SNIP. Earlier steps, of a checkpoint without SNIP, do not count.
        steps: number of steps since then.
        shares: sum over these steps of the fp4 share of the map in force.
        times: sum over these steps of the predicted time of the decoder's linears, relative to bf16: 1 / speedup.
        last: the step before which the run ends; None if it was not known.
    """

    origin: int
    steps: int = 0
    shares: float = 0.0
    times: float = 0.0
    last: int | None = None

    def __post_init__(self) -> None:
        for name in ("shares", "times"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be 0 or more")

    def add(self, share: float, time: float, steps: int = 1) -> None:
        """Add steps that ran under one map."""
        self.steps += steps
        self.shares += steps * share
        self.times += steps * time

    @property
    def next_step(self) -> int:
        """The step that follows the last one that counts, or an earlier one if training has left out steps."""
        return self.origin + self.steps

    def average(self, *, timed: bool) -> float:
        """Return the mean fp4 share; with ``timed`` the harmonic mean of the speedups. 0 without steps."""
        if not self.steps:
            return 0.0
        if not timed:
            return self.shares / self.steps
        return self.steps / self.times if self.times > 0.0 else 0.0


def relative_time(precision_map: PrecisionMap) -> float:
    """Return the predicted time of a step's linears under a map, relative to bf16; 1 if nothing was predicted."""
    return 1.0 if precision_map.speedup is None or precision_map.speedup <= 0.0 else 1.0 / precision_map.speedup
