"""What a solve may spend, and what comes out of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from snip_megatron.solver.table import Ints


@dataclass
class Limits:
    """What a solve may spend. All parts of one solve share one object, or parts of it made by :meth:`within`.

    Equal limits give equal results, unless the deadline ends the search.

    Attributes:
        deadline: the value of ``time.perf_counter()`` at which the search ends; may be inf.
        deterministic: CP-SAT's deterministic seconds; may be inf.
        seed: CP-SAT's seed.
        spent: the deterministic seconds spent so far.
        whole: the limits that these are a part of; what is spent here is spent there, too.
    """

    deadline: float
    deterministic: float
    seed: int
    spent: float = 0.0
    whole: Limits | None = None

    @property
    def seconds(self) -> float:
        """Wall seconds left."""
        return self.deadline - time.perf_counter()

    @property
    def left(self) -> float:
        """Deterministic seconds left."""
        return self.deterministic - self.spent

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0 or self.seconds <= 0

    def within(self, deterministic: float) -> Limits:
        """Return limits for a part of the solve: at most ``deterministic`` of what is left."""
        return Limits(self.deadline, min(deterministic, self.left), self.seed, whole=self)

    def spend(self, deterministic: float) -> None:
        """Add to what is spent."""
        self.spent += deterministic
        if self.whole is not None:
            self.whole.spend(deterministic)


@dataclass(frozen=True)
class Outcome:
    """The result of one search.

    Attributes:
        pick: the columns picked, [n]; they meet every need.
        bound: a lower bound of Σ loss (as given).
        optimal: whether the picks were proven optimal.
    """

    pick: Ints
    bound: float
    optimal: bool
