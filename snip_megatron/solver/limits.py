"""The limits of a solve, and the result of a search."""

from __future__ import annotations

import time
from dataclasses import dataclass

from snip_megatron.solver.table import Ints


@dataclass
class Limits:
    """What a solve may spend. Equal limits give equal results, unless the deadline ends the search.

    Attributes:
        deadline: value of ``time.perf_counter()`` at which the search ends; may be inf.
        deterministic: limit in CP-SAT's deterministic seconds; may be inf.
        seed: CP-SAT's seed.
        spent: deterministic seconds spent so far.
    """

    deadline: float
    deterministic: float
    seed: int
    spent: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock seconds that are left."""
        return self.deadline - time.perf_counter()

    @property
    def left(self) -> float:
        """Deterministic seconds that are left."""
        return self.deterministic - self.spent

    @property
    def over(self) -> bool:
        """Whether one of the limits is spent."""
        return self.left <= 0 or self.seconds <= 0


@dataclass
class Outcome:
    """The result of a search.

    Attributes:
        pick: the best picks, which meet the budget.
        bound: lower bound of their score.
        gap: their certified gap.
    """

    pick: Ints
    bound: float
    gap: float
