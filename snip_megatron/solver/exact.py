"""The exact solver: relax, fix what cannot be in a better solution, let CP-SAT settle the rest.

A plain CP-SAT model of a 70B problem with six formats takes 10 s and more on 2 cores; nearly all of its choices are
settled by their reduced costs once a good solution is known. So CP-SAT first solves small cores (the open choices of
smallest reduced cost), which only has to improve the solution, and then the whole of what is left, which is the proof.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from snip_megatron.solver.core import CoreResult, solve_core
from snip_megatron.solver.limits import Limits, Outcome
from snip_megatron.solver.relaxation import Relaxation, gap, relax
from snip_megatron.solver.rounding import round_picks
from snip_megatron.solver.stages import lift_stages
from snip_megatron.solver.table import ChoiceTable, Ints

CORES = ((60, 0.05), (120, 0.1), (240, 0.2), (480, 0.4))
"""Open choices, beyond one an item, of the improving rounds, and the deterministic seconds that each may take."""
LIFT_ABOVE = 240
"""Where more than this is open after a round, binding stages are solved on their own."""
SINGLE_EFFORT = 5.0
"""Deterministic seconds of the proof in one search before several interleaved ones take over."""
STAGE_EFFORT = 0.5
"""Deterministic seconds for one stage on its own."""


def solve_exact(table: ChoiceTable, start: Ints | None, limits: Limits) -> Outcome:
    """Optimal picks of a feasible problem; the best found with a bound where ``limits`` end the search first.

    ``start``: feasible picks, such as the previous map's; used where better than the relaxation's.
    """
    if table.need == -math.inf and len(table.stages) > 1:
        return _solve_stages(table, start, limits)
    search = _Search(table, relax(table), limits)
    search.offer(round_picks(table, search.relaxation))
    if start is not None:
        search.offer(start)
    search.improve(CORES[:1])
    if search.left_open() > LIFT_ABOVE:
        search.lift_stages()
    search.improve(CORES)
    optimal = search.prove()
    objective = table.objective(search.pick)
    bound = min(objective, max(search.bound, objective - search.distance))
    return Outcome(search.pick, bound, optimal, search.spent)


def _solve_stages(table: ChoiceTable, start: Ints | None, limits: Limits) -> Outcome:
    """Without a need of the total the stages are problems of their own."""
    pick = np.zeros(len(table.ids), dtype=np.int64)
    begun = time.perf_counter()
    spent, outcomes = 0.0, []
    for k, need in enumerate(table.stage_need.tolist()):
        rows = np.nonzero(table.stage == k)[0]
        left = replace(
            limits,
            seconds=limits.seconds - (time.perf_counter() - begun),
            deterministic=limits.deterministic - spent,
        )
        part = table.part(rows, table.true_loss[rows], need)
        outcome = solve_exact(part, None if start is None else start[rows], left)
        pick[rows] = outcome.pick
        spent += outcome.deterministic
        outcomes.append(outcome)
    bound = min(table.objective(pick), math.fsum(o.bound for o in outcomes))
    return Outcome(pick, bound, all(o.optimal for o in outcomes), spent)


class _Search:
    """The best picks so far, what they leave open, and what may still be spent."""

    def __init__(self, table: ChoiceTable, relaxation: Relaxation, limits: Limits) -> None:
        self.table, self.relaxation, self.limits = table, relaxation, limits
        self.started = time.perf_counter()
        self.spent = 0.0
        self.bound = -np.inf
        self.pick = table.most_saving()
        self.gap = gap(table, relaxation, self.pick)
        self.lift = np.zeros(len(table.stages))

    def offer(self, pick: Ints) -> None:
        """Keep feasible picks if they are better."""
        if self.table.feasible(pick) and self.table.difference(pick, self.pick) < 0:
            self.pick = pick
            self.gap = min(self.gap, gap(self.table, self.relaxation, pick))

    @property
    def distance(self) -> float:
        """At least objective − optimum."""
        return max(0.0, self.gap - math.fsum(self.lift))

    def left_open(self) -> int:
        """Open choices beyond one an item."""
        return int(self.open_choices().sum()) - len(self.pick)

    def open_choices(self, most: int | None = None) -> NDArray[np.bool_]:
        """[n, F] every choice that may be in a better solution, or only the ``most`` likeliest beyond one an item."""
        # A solution that holds a choice is above the bound by its reduced cost and by the other stages' lifts, so by
        # this much above the bound that counts all lifts.
        above = self.relaxation.reduced - self.relaxation.error - self.lift[self.table.stage][:, None]
        open_ = above <= self.distance
        if most is not None:
            likeliest = np.argsort(above, axis=None, kind="stable")[: len(self.pick) + most]
            first = np.zeros(open_.size, dtype=bool)
            first[likeliest] = True
            open_ &= first.reshape(open_.shape)
        open_[np.arange(len(self.pick)), self.pick] = True
        return open_

    def run(self, open_: NDArray[np.bool_], effort: float, workers: int = 1) -> CoreResult | None:
        """One CP-SAT solve; None when nothing is left to spend."""
        seconds = self.limits.seconds - (time.perf_counter() - self.started)
        effort = min(effort, self.limits.deterministic - self.spent)
        if seconds <= 0 or effort <= 0:
            return None
        limits = replace(self.limits, seconds=seconds, deterministic=effort, workers=workers)
        result = solve_core(self.table, open_, self.pick, limits)
        self.spent += result.deterministic
        if result.pick is not None:
            self.offer(result.pick)
        return result

    def improve(self, cores: Sequence[tuple[int, float]]) -> None:
        """Solve growing cores; done when the next would hold everything that is open."""
        for most, effort in cores:
            if self.left_open() <= most:
                return
            self.run(self.open_choices(most), effort)

    def lift_stages(self) -> None:
        """Solve binding stages on their own."""

        def solve(part: ChoiceTable, start: Ints) -> Outcome:
            seconds = self.limits.seconds - (time.perf_counter() - self.started)
            effort = min(STAGE_EFFORT, self.limits.deterministic - self.spent)
            outcome = solve_exact(part, start, replace(self.limits, seconds=seconds, deterministic=effort, workers=1))
            self.spent += outcome.deterministic
            return outcome

        lifts = lift_stages(self.table, self.relaxation, self.pick, solve)
        self.lift = lifts.lift
        self.offer(lifts.pick)

    def prove(self) -> bool:
        """Solve everything that is open; True when that was proven.

        Losses are integers at 2^-60 of the open choices' sum. Where that is coarse beside the objective and the proof
        itself closed choices by finding better picks, it is repeated: on fewer choices the integers are finer.
        """
        for effort, workers in ((SINGLE_EFFORT, 1), (math.inf, self.limits.workers)):
            left = self.left_open()
            result = self.run(self.open_choices(), effort, workers)
            while result is not None and result.optimal and self._is_coarse(result) and self.left_open() < left:
                left = self.left_open()
                result = self.run(self.open_choices(), effort, workers)
            if result is not None:
                self.bound = max(self.bound, result.bound)
                if result.optimal:
                    return True
        return False

    def _is_coarse(self, result: CoreResult) -> bool:
        rows = np.arange(len(self.pick))
        objective = math.fsum(self.table.loss[rows, self.pick])
        return result.resolution > sys.float_info.epsilon * objective > 0
