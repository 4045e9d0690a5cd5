"""Settings of the guard, which restores the previous map if the loss spikes after an adoption."""

from __future__ import annotations

import math
from dataclasses import dataclass

from snip_megatron.errors import SnipError

LEAST_LOSSES = 10
"""Minimum number of losses for a spike test. With fewer losses, the guard reacts only to NaN and Inf."""


@dataclass(frozen=True)
class GuardSettings:
    """The ``--snip-guard-*`` arguments.

    Attributes:
        steps: number of steps after an adoption during which the guard watches the map; 0 disables the guard.
        sigma: a loss is a spike if it is this many standard deviations above the mean before the adoption.
        patience: number of spikes in a row after which the map is taken back.
        window: number of losses before the adoption from which mean and standard deviation are computed.
        bar: limit of the next map's predicted loss, as a share of the predicted loss of the map that was taken back.

    Raises:
        SnipError: a value is out of range.
    """

    steps: int = 100
    sigma: float = 6.0
    patience: int = 3
    window: int = 50
    bar: float = 0.9

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("patience", 1), ("window", LEAST_LOSSES)):
            if getattr(self, name) < least:
                raise SnipError(f"--snip-guard-{name} {getattr(self, name)}: must be at least {least}")
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise SnipError(f"--snip-guard-sigma {self.sigma}: must be positive")
        if not 0 < self.bar <= 1:
            raise SnipError(f"--snip-guard-bar {self.bar}: must lie in (0, 1]")
