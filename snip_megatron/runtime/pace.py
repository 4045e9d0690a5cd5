"""Detection of maps under which training steps take longer than in bf16. It warns once for each map.

The times are those of Megatron's own step on rank 0, without probes and waits. A run that does not start in bf16 (a
fixed map, a resume under a map) has no times to compare with.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from snip_megatron.precision import Format, PrecisionMap

SETTLING = 3
"""Steps ignored after a start and after an adoption, because they compile and allocate."""
STEPS = 16
"""Minimum number of steps for a median."""
TOLERANCE = 1.03
"""Factor within which two medians count as equal. On an idle machine they are repeatable within 2 %."""


@dataclass(frozen=True)
class Slower:
    """The finding that steps under a map take longer than in bf16.

    Attributes:
        version: the map's version.
        bf16_s: median seconds of a step in bf16.
        map_s: median seconds of a step under the map.
    """

    version: int
    bf16_s: float
    map_s: float

    @property
    def ratio(self) -> float:
        """The step time under the map divided by that in bf16."""
        return self.map_s / self.bf16_s

    def __str__(self) -> str:
        return (
            f"steps take {self.ratio:.2f} of what they took in bf16 (medians of {STEPS}: {self.map_s * 1e3:.1f} ms,"
            f" {self.bf16_s * 1e3:.1f} ms) under map {self.version}. If the GPU waits for its host, larger microbatches"
            " or fewer tensor parallel ranks help; else ask for what pays: --snip-budget speedup=X, snip plan"
        )


class Pace:
    """Step times in bf16 and under the map in force."""

    def __init__(self) -> None:
        self._bf16: deque[float] = deque(maxlen=STEPS)
        self._map: deque[float] = deque(maxlen=STEPS)
        self._version: int | None = None
        self._settling = SETTLING

    def adopted(self, precision_map: PrecisionMap) -> None:
        """Note that ``precision_map`` is in force from the next step on."""
        self._version = precision_map.version if is_quantised(precision_map) else None
        self._map.clear()
        self._settling = SETTLING

    def step(self, seconds: float) -> Slower | None:
        """Note the duration of a step. Returns a finding at most once for each map, after enough steps."""
        if self._settling:
            self._settling -= 1
            return None
        if self._version is None:
            self._bf16.append(seconds)
            return None
        if len(self._map) == STEPS or len(self._bf16) < STEPS:
            return None
        self._map.append(seconds)
        if len(self._map) < STEPS:
            return None
        found = Slower(self._version, statistics.median(self._bf16), statistics.median(self._map))
        return found if found.ratio > TOLERANCE else None


def is_quantised(precision_map: PrecisionMap) -> bool:
    """Return whether any GEMM of the map is not in bf16."""
    return any(fmt is not Format.BF16 for fmt in precision_map.choices.values())
