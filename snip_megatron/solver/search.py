"""The search that problems with and without phases share: remove choices, improve on small cores, prove with CP-SAT."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from snip_megatron.solver.core import CoreResult
from snip_megatron.solver.limits import Limits, Outcome
from snip_megatron.solver.table import Floats, Ints

CORES = ((60, 0.05), (120, 0.1), (240, 0.2), (480, 0.4))
"""Cores of the improving rounds: number of open choices beyond one per decision, limit in deterministic seconds."""
CONFLICT_EFFORT = 5.0
"""Limit, in deterministic seconds, of the proof that branches on conflicts. It takes at most half of what is left.

A proof that branches on the LP relaxation takes the rest. Each of the two proves instances that the other does not.
"""


class Picked(Protocol):
    """The arrays of a problem that a search needs. Picks are the column of every decision, [n]."""

    @property
    def loss(self) -> Floats:
        """Losses [n, F]. The smallest loss of every decision is 0."""

    def objective(self, pick: Ints) -> float:
        """Return Σ loss as given."""

    def difference(self, pick: Ints, other: Ints) -> float:
        """Return objective(pick) − objective(other)."""

    def feasible(self, pick: Ints) -> bool:
        """Return whether the picks meet every need."""


class Search(ABC):
    """A search: the best picks so far, the choices that are still open, and the limits."""

    def __init__(self, table: Picked, reduced: Floats, pick: Ints, limits: Limits) -> None:
        """Start a search.

        Args:
            table: the problem.
            reduced: reduced costs [n, F] minus bounds of their rounding errors.
            pick: feasible picks.
            limits: what the search may spend.
        """
        self.picked, self.reduced, self.limits = table, reduced, limits
        self.bound = -np.inf
        self.pick = pick
        self.gap = self.gap_of(pick)
        self.lift = np.zeros(1)
        self.lift_of = np.zeros(len(pick), dtype=np.int64)

    @abstractmethod
    def gap_of(self, pick: Ints) -> float:
        """Return an upper bound of objective(pick) − optimum."""

    @abstractmethod
    def solve_core(self, open_: NDArray[np.bool_], limits: Limits, *, by_lp: bool) -> CoreResult:
        """Minimise Σ loss over the open choices [n, F], starting from the best picks."""

    def offer(self, pick: Ints) -> None:
        """Take ``pick`` as the best picks if they are feasible and better."""
        if self.picked.feasible(pick) and self.picked.difference(pick, self.pick) < 0:
            self.pick = pick
            self.gap = min(self.gap, self.gap_of(pick))

    @property
    def distance(self) -> float:
        """Upper bound of the distance of the best picks from the optimum."""
        return max(0.0, self.gap - math.fsum(self.lift))

    def left_open(self) -> int:
        """Return the number of open choices beyond one per decision."""
        return int(self.open_choices().sum()) - len(self.pick)

    def open_choices(self, most: int | None = None) -> NDArray[np.bool_]:
        """Return which choices are open, bool [n, F]: those that a better solution may have.

        With ``most`` only the likeliest ones: as many choices beyond one per decision.
        """
        # A solution with this choice exceeds the relaxation's bound by its reduced cost and by the lifts of the other
        # stages. It exceeds the bound that includes all lifts by the following difference.
        above = self.reduced - self.lift[self.lift_of][:, None]
        open_: NDArray[np.bool_] = above <= self.distance
        open_[np.arange(len(self.pick)), self.pick] = True
        return open_ if most is None else open_ & self.likeliest(above, most)

    def likeliest(self, rank: Floats, most: int) -> NDArray[np.bool_]:
        """Return the choices of lowest finite rank, bool [n, F]: as many as there are decisions and ``most`` more.

        The best picks are among them.
        """
        order = np.argsort(rank, axis=None, kind="stable")[: len(self.pick) + most]
        first = np.zeros(rank.size, dtype=bool)
        first[order] = True
        chosen: NDArray[np.bool_] = first.reshape(rank.shape) & np.isfinite(rank)
        chosen[np.arange(len(self.pick)), self.pick] = True
        return chosen

    def run(self, open_: NDArray[np.bool_], limits: Limits, *, by_lp: bool = False) -> CoreResult | None:
        """Solve one core. Returns None if the limits are spent."""
        if limits.over:
            return None
        result = self.solve_core(open_, limits, by_lp=by_lp)
        if result.pick is not None:
            self.offer(result.pick)
        return result

    def improve(self, cores: Sequence[tuple[int, float]] = CORES) -> None:
        """Solve growing cores, until the next one would hold everything that is open."""
        for most, effort in cores:
            if self.left_open() <= most:
                return
            self.run(self.open_choices(most), self.limits.within(effort))

    def prove(self) -> bool:
        """Solve everything that is open. Returns whether the best picks were proven optimal.

        Losses are integers in units of 2^-60 of the sum of the open choices. If this unit is coarse relative to the
        objective, and if the proof has closed choices by finding better picks, the proof is repeated: with fewer open
        choices the unit is finer.
        """
        effort = min(CONFLICT_EFFORT, self.limits.left / 2)
        return self.attempt(self.limits.within(effort)) or self.attempt(self.limits, by_lp=True)

    def attempt(self, limits: Limits, *, by_lp: bool = False) -> bool:
        """Solve everything that is open within ``limits``. Returns whether the best picks were proven optimal."""
        left = self.left_open()
        result = self.run(self.open_choices(), limits, by_lp=by_lp)
        while result is not None and result.optimal and self._is_coarse(result) and self.left_open() < left:
            left = self.left_open()
            result = self.run(self.open_choices(), limits, by_lp=by_lp)
        if result is None:
            return False
        self.bound = max(self.bound, result.bound)
        return result.optimal

    def outcome(self, *, optimal: bool) -> Outcome:
        """Return the best picks with their bound."""
        objective = self.picked.objective(self.pick)
        bound = min(objective, max(self.bound, objective - self.distance))
        return Outcome(self.pick, bound, optimal)

    def _is_coarse(self, result: CoreResult) -> bool:
        rows = np.arange(len(self.pick))
        objective = math.fsum(self.picked.loss[rows, self.pick])
        return result.resolution > sys.float_info.epsilon * objective > 0
