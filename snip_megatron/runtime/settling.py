"""How much longer steps take right after an update or an adoption: the part of its cost that no wait shows.

The times are rank 0's, around Megatron's own step. An update's steps are compared with those before it, an adoption's
with those that follow: the map is another one.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

AFTER = 3
"""Steps that may allocate, compile or load something."""
_COMPARED = 5
_KEPT = 16


@dataclass(frozen=True)
class Settled:
    """Steps are back to normal.

    Attributes:
        of: ``update`` or ``adopt``.
        of_step: The step before which that was.
        version: Of the map.
        steps: How many steps took longer, or were looked at.
        wait_s: Seconds by which they took longer, all together; 0 where they did not.
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


class Settling:
    """Looks at the times of steps, one after the other."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_KEPT)
        self._open: _Open | None = None

    def begin(self, of: str, step: int, version: int) -> Settled | None:
        """An update or an adoption precedes ``step``. Returns what is known of the one before."""
        before = self._close()
        if self._usual:  # else nothing has run yet: the first steps of a process are slow by themselves
            self._open = _Open(of, step, version)
        return before

    def step(self, seconds: float) -> Settled | None:
        """Note the time of a step. Returns the account of the last update or adoption once, when it is complete."""
        if self._open is None:
            self._usual.append(seconds)
            return None
        self._open.seconds.append(seconds)
        wanted = AFTER if self._open.of == "update" else AFTER + _COMPARED
        return self._close() if len(self._open.seconds) == wanted else None

    def _close(self) -> Settled | None:
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
        return Settled(found.of, found.step, found.version, len(first), round(max(0.0, longer), 6))
