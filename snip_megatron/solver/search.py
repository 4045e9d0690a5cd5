"""The search that both kinds of problems share: fix what cannot be in a better solution, let CP-SAT settle the rest."""

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
"""Open choices, beyond one a decision, of the improving rounds, and the deterministic seconds that each may take."""
CONFLICT_EFFORT = 5.0
"""Deterministic seconds of the proof that branches by conflicts, at most half of what is left; one that branches by the
LP relaxation takes the rest. Each proves instances that the other does not."""


class Picked(Protocol):
    """The arrays of a problem, as far as a search needs them; picks are columns [n]."""

    @property
    def loss(self) -> Floats:
        """[n, F] losses, the smallest of a decision 0."""

    def objective(self, pick: Ints) -> float:
        """Σ loss."""

    def difference(self, pick: Ints, other: Ints) -> float:
        """objective(pick) − objective(other)."""

    def feasible(self, pick: Ints) -> bool:
        """Whether the picks meet every need."""


class Search(ABC):
    """The best picks so far, what they leave open, and what may still be spent."""

    def __init__(self, table: Picked, reduced: Floats, pick: Ints, limits: Limits) -> None:
        """``reduced``: reduced costs [n, F], less their rounding errors; ``pick``: feasible."""
        self.picked, self.reduced, self.limits = table, reduced, limits
        self.bound = -np.inf
        self.pick = pick
        self.gap = self.gap_of(pick)
        self.lift = np.zeros(1)
        self.lift_of = np.zeros(len(pick), dtype=np.int64)

    @abstractmethod
    def gap_of(self, pick: Ints) -> float:
        """At least objective(pick) − optimum."""

    @abstractmethod
    def solve_core(self, open_: NDArray[np.bool_], limits: Limits, *, by_lp: bool) -> CoreResult:
        """Minimise Σ loss over the open choices [n, F], starting from the best picks."""

    def offer(self, pick: Ints) -> None:
        """Keep feasible picks if they are better."""
        if self.picked.feasible(pick) and self.picked.difference(pick, self.pick) < 0:
            self.pick = pick
            self.gap = min(self.gap, self.gap_of(pick))

    @property
    def distance(self) -> float:
        """At least objective − optimum."""
        return max(0.0, self.gap - math.fsum(self.lift))

    def left_open(self) -> int:
        """Open choices beyond one a decision."""
        return int(self.open_choices().sum()) - len(self.pick)

    def open_choices(self, most: int | None = None) -> NDArray[np.bool_]:
        """[n, F] every choice that may be in a better solution, or only the ``most`` likeliest beyond one a
        decision."""
        # A solution that holds a choice is above the bound by its reduced cost and by the other stages' lifts, so by
        # this much above the bound that counts all lifts.
        above = self.reduced - self.lift[self.lift_of][:, None]
        open_: NDArray[np.bool_] = above <= self.distance
        if most is not None:
            likeliest = np.argsort(above, axis=None, kind="stable")[: len(self.pick) + most]
            first = np.zeros(open_.size, dtype=bool)
            first[likeliest] = True
            open_ &= first.reshape(open_.shape)
        open_[np.arange(len(self.pick)), self.pick] = True
        return open_

    def run(self, open_: NDArray[np.bool_], limits: Limits, *, by_lp: bool = False) -> CoreResult | None:
        """One core; None when nothing is left to spend."""
        if limits.over:
            return None
        result = self.solve_core(open_, limits, by_lp=by_lp)
        if result.pick is not None:
            self.offer(result.pick)
        return result

    def improve(self, cores: Sequence[tuple[int, float]] = CORES) -> None:
        """Solve growing cores; done when the next would hold everything that is open."""
        for most, effort in cores:
            if self.left_open() <= most:
                return
            self.run(self.open_choices(most), self.limits.within(effort))

    def prove(self) -> bool:
        """Solve everything that is open; True when that was proven.

        Losses are integers at 2^-60 of the open choices' sum. Where that is coarse beside the objective and the proof
        itself closed choices by finding better picks, it is repeated: on fewer choices the integers are finer.
        """
        for by_lp in (False, True):
            limits = self.limits if by_lp else self.limits.within(min(CONFLICT_EFFORT, self.limits.left / 2))
            left = self.left_open()
            result = self.run(self.open_choices(), limits, by_lp=by_lp)
            while result is not None and result.optimal and self._is_coarse(result) and self.left_open() < left:
                left = self.left_open()
                result = self.run(self.open_choices(), limits, by_lp=by_lp)
            if result is not None:
                self.bound = max(self.bound, result.bound)
                if result.optimal:
                    return True
        return False

    def outcome(self, *, optimal: bool) -> Outcome:
        """The best picks with what is known of them."""
        objective = self.picked.objective(self.pick)
        bound = min(objective, max(self.bound, objective - self.distance))
        return Outcome(self.pick, bound, optimal)

    def _is_coarse(self, result: CoreResult) -> bool:
        rows = np.arange(len(self.pick))
        objective = math.fsum(self.picked.loss[rows, self.pick])
        return result.resolution > sys.float_info.epsilon * objective > 0
