"""Whether training steps got longer under a map than they were in bf16: said once a map; nobody is slowed unawares.

The times are rank 0's, around Megatron's own step; probes and waits are not in them. A run that never trains in bf16
first (a fixed map from the start, a resume under a map) has nothing to compare with.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from snip_megatron.precision import Format, PrecisionMap

_SETTLING = 3  # steps that compile and allocate, after a start and after an adoption
_STEPS = 16
_TOLERANCE = 1.03  # medians of a quiet machine repeat within 2 %


@dataclass(frozen=True)
class Slower:
    """Steps under a map took longer than in bf16: medians, in seconds."""

    version: int
    bf16_s: float
    map_s: float

    @property
    def ratio(self) -> float:
        """Over bf16's."""
        return self.map_s / self.bf16_s

    def __str__(self) -> str:
        return (
            f"steps take {self.ratio:.2f} of what they took in bf16 (medians of {_STEPS}: {self.map_s * 1e3:.1f} ms,"
            f" {self.bf16_s * 1e3:.1f} ms) under map {self.version}. If the GPU waits for its host, larger microbatches"
            " or fewer tensor parallel ranks help; else ask for what pays: --snip-budget speedup=X, snip plan"
        )


class Pace:
    """Step times in bf16 and under the map in force."""

    def __init__(self) -> None:
        self._bf16: deque[float] = deque(maxlen=_STEPS)
        self._map: deque[float] = deque(maxlen=_STEPS)
        self._version: int | None = None
        self._settling = _SETTLING

    def adopted(self, precision_map: PrecisionMap) -> None:
        """Another map is in force from the next step on."""
        quantised = any(fmt is not Format.BF16 for fmt in precision_map.choices.values())
        self._version = precision_map.version if quantised else None
        self._map.clear()
        self._settling = _SETTLING

    def step(self, seconds: float) -> Slower | None:
        """Note a step's time; the answer comes once a map, when there are enough."""
        if self._settling:
            self._settling -= 1
            return None
        if self._version is None:
            self._bf16.append(seconds)
            return None
        if len(self._map) == _STEPS or len(self._bf16) < _STEPS:
            return None
        self._map.append(seconds)
        if len(self._map) < _STEPS:
            return None
        found = Slower(self._version, statistics.median(self._bf16), statistics.median(self._map))
        return found if found.ratio > _TOLERANCE else None
