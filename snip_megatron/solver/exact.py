"""The exact solver: relax, fix what cannot be in a better solution, let CP-SAT settle the rest.

A plain CP-SAT model of a 70B problem with six formats takes 10 s and more on 2 cores; nearly all of its choices are
settled by their reduced costs once a good solution is known. So CP-SAT first solves small cores (the open choices of
smallest reduced cost), which only has to improve the solution, and then the whole of what is left, which is the proof.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from snip_megatron.solver.core import solve_core
from snip_megatron.solver.limits import Limits, Outcome
from snip_megatron.solver.relaxation import Relaxation, gap, relax
from snip_megatron.solver.rounding import round_picks
from snip_megatron.solver.table import ChoiceTable, Ints

CORES = (60, 120, 240, 480)
"""Open choices beyond one an item in the improving rounds."""
CORE_EFFORT = (0.05, 0.1, 0.2, 0.4)
"""Deterministic seconds that each of them may take."""
SINGLE_EFFORT = 5.0
"""Deterministic seconds of the proof in one search before several interleaved ones take over."""


def solve_exact(table: ChoiceTable, start: Ints | None, limits: Limits) -> Outcome:
    """Optimal picks of a feasible problem; the best found with a bound where ``limits`` end the search first.

    ``start``: feasible picks, such as the previous map's; used where better than the relaxation's.
    """
    search = _Search(table, relax(table), limits)
    search.offer(round_picks(table, search.relaxation))
    if start is not None:
        search.offer(start)
    for most, effort in zip(CORES, CORE_EFFORT, strict=True):
        open_ = search.open_choices(most)
        if int(open_.sum()) < int(search.open_choices().sum()):
            search.run(open_, effort)
    optimal = search.prove()
    objective = table.objective(search.pick)
    bound = min(objective, max(search.bound, objective - search.gap))
    return Outcome(search.pick, bound, optimal, search.spent)


class _Search:
    """The best picks so far, what they leave open, and what may still be spent."""

    def __init__(self, table: ChoiceTable, relaxation: Relaxation, limits: Limits) -> None:
        self.table, self.relaxation, self.limits = table, relaxation, limits
        self.started = time.perf_counter()
        self.spent = 0.0
        self.bound = -np.inf
        self.pick = table.most_saving()
        self.gap = gap(table, relaxation, self.pick)

    def offer(self, pick: Ints) -> None:
        """Keep feasible picks if they are better."""
        if self.table.feasible(pick) and self.table.difference(pick, self.pick) < 0:
            self.pick = pick
            self.gap = min(self.gap, gap(self.table, self.relaxation, pick))

    def open_choices(self, most: int | None = None) -> NDArray[np.bool_]:
        """[n, F] every choice that may be in a better solution, or only the ``most`` likeliest beyond one an item."""
        reduced = self.relaxation.reduced - self.relaxation.error
        open_ = reduced <= self.gap
        if most is not None:
            likeliest = np.argsort(reduced, axis=None, kind="stable")[: len(self.pick) + most]
            first = np.zeros(open_.size, dtype=bool)
            first[likeliest] = True
            open_ &= first.reshape(open_.shape)
        open_[np.arange(len(self.pick)), self.pick] = True
        return open_

    def run(self, open_: NDArray[np.bool_], effort: float, workers: int = 1) -> tuple[bool, float]:
        """One CP-SAT solve: whether it proved its optimum, and its bound. Spends nothing when nothing is left."""
        seconds = self.limits.seconds - (time.perf_counter() - self.started)
        effort = min(effort, self.limits.deterministic - self.spent)
        if seconds <= 0 or effort <= 0:
            return False, -np.inf
        limits = replace(self.limits, seconds=seconds, deterministic=effort, workers=workers)
        result = solve_core(self.table, open_, self.pick, limits)
        self.spent += result.deterministic
        if result.pick is not None:
            self.offer(result.pick)
        return result.optimal, result.bound

    def prove(self) -> bool:
        """Solve everything that is open; True when that was proven.

        Losses are integers at 2^-60 of the open choices' sum. When the proof itself found better picks and so closed
        choices, it is repeated: on fewer choices the same integers are finer.
        """
        for effort, workers in ((SINGLE_EFFORT, 1), (np.inf, self.limits.workers)):
            open_ = self.open_choices()
            optimal, bound = self.run(open_, effort, workers)
            while optimal and int(self.open_choices().sum()) < int(open_.sum()):
                open_ = self.open_choices()
                optimal, bound = self.run(open_, effort, workers)
            self.bound = max(self.bound, bound)
            if optimal:
                return True
        return False
