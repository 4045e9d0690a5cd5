"""The limits of a solve, and the result of a search."""

from __future__ import annotations

import time
from dataclasses import dataclass

from snip_megatron.solver.table import Ints


@dataclass
class Limits:
    """What a solve may spend.

    All parts of one solve share one object, or objects that :meth:`within` derives from it. Equal limits give equal
    results, unless the deadline ends the search.

    Attributes:
        deadline: value of ``time.perf_counter()`` at which the search ends; may be inf.
        deterministic: limit in CP-SAT's deterministic seconds; may be inf.
        seed: CP-SAT's seed.
        spent: deterministic seconds spent so far.
        whole: the limits from which these are derived. What is spent here is spent there, too.
    """

    deadline: float
    deterministic: float
    seed: int
    spent: float = 0.0
    whole: Limits | None = None

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

    def within(self, deterministic: float) -> Limits:
        """Return limits for a part of the solve, which may spend at most ``deterministic`` of what is left."""
        return Limits(self.deadline, min(deterministic, self.left), self.seed, whole=self)

    def spend(self, deterministic: float) -> None:
        """Record deterministic seconds that were spent."""
        self.spent += deterministic
        if self.whole is not None:
            self.whole.spend(deterministic)


@dataclass(frozen=True)
class Outcome:
    """The result of one search.

    Attributes:
        pick: column of every decision, [n]. The picks meet every need.
        bound: lower bound of Σ loss (as given).
        optimal: whether the picks were proven optimal.
    """

    pick: Ints
    bound: float
    optimal: bool
