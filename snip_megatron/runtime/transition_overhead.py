"""Measures how much longer steps take right after an update or an adoption, which is a part of its cost.

The times are those of Megatron's own step on rank 0. The steps after an update are compared with the steps before it.
The steps after an adoption are compared with later steps, because the map is another one.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

AFTER = 3
"""Number of steps that may still allocate, compile or load something."""
_COMPARED = 5
_KEPT = 16


@dataclass(frozen=True)
class TransitionCost:
    """The cost of an update or an adoption in the steps after it.

    Attributes:
        of: ``update`` or ``adopt``.
        of_step: the step before which it happened.
        version: the version of the map.
        steps: number of steps that took longer, or that were examined.
        wait_s: seconds by which these steps took longer in all; 0 if they did not.
    """

    of: str
    of_step: int
    version: int
    steps: int
    wait_s: float


@dataclass
class _Open:
    of: str
    step: int
    version: int
    seconds: list[float] = field(default_factory=list)


class TransitionOverhead:
    """Observes the times of steps, one after the other."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_KEPT)
        self._open: _Open | None = None

    def begin(self, of: str, step: int, version: int) -> TransitionCost | None:
        """Note that an update or an adoption precedes ``step``.

        Returns the cost of the one before, as far as it is known.
        """
        before = self._close()
        if self._usual:  # else nothing has run yet: the first steps of a process are slow by themselves
            self._open = _Open(of, step, version)
        return before

    def step(self, seconds: float) -> TransitionCost | None:
        """Note the time of a step. Returns the cost of the last update or adoption once, when it is complete."""
        if self._open is None:
            self._usual.append(seconds)
            return None
        self._open.seconds.append(seconds)
        wanted = AFTER if self._open.of == "update" else AFTER + _COMPARED
        return self._close() if len(self._open.seconds) == wanted else None

    def _close(self) -> TransitionCost | None:
        found, self._open = self._open, None
        if found is None:
            return None
        first, later = found.seconds[:AFTER], found.seconds[AFTER:]
        if found.of != "update":
            self._usual.clear()
            self._usual.extend(later)
        if not first or not self._usual:
            return None
        longer = sum(first) - len(first) * statistics.median(self._usual)
        return TransitionCost(found.of, found.step, found.version, len(first), round(max(0.0, longer), 6))
