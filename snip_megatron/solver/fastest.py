"""The budget ``loss``: the smallest time of the slowest stage whose Σ loss stays within the bound.

Least loss within a time is the problem that the other solvers take (every stage on its own), and it does not rise with
the time allowed: so the time is bisected. The relaxation's bound or its rounded picks settle most times; only where
they disagree is a time solved exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from snip_megatron.solver.items import Budget
from snip_megatron.solver.limits import Outcome
from snip_megatron.solver.relaxation import gap, relax
from snip_megatron.solver.rounding import round_picks
from snip_megatron.solver.table import ChoiceTable, Ints

RESOLUTION = 1e-9
"""Times closer than this share of the reference (nothing saved) count as equal."""
_ROUNDING = 1e-12


def solve_fastest(table: ChoiceTable, budget: Budget, solve: Callable[[ChoiceTable, Ints], Outcome]) -> Outcome | None:
    """Picks with the smallest time; the outcome's bound is one of that time, ``optimal`` up to the resolution.

    ``solve`` takes (table, feasible picks) and minimises Σ loss. None when no picks stay within the loss.
    """
    assert budget.loss is not None
    search = _Bisection(table, budget, solve, budget.loss)
    if table.objective(search.pick) > budget.loss:
        return None
    proven = True
    while search.high - search.low > RESOLUTION * table.reference(budget):
        middle = search.low + (search.high - search.low) / 2
        proven = search.settle(middle) and proven
    # Of the fastest maps, one with the least loss.
    final = search.within(table.slowest(search.pick, budget) + _ROUNDING * table.reference(budget))
    if final.feasible(search.pick):
        outcome = solve(final, search.pick)
        if final.difference(outcome.pick, search.pick) < 0:
            search.pick = outcome.pick
    return Outcome(search.pick, search.bound, proven)


class _Bisection:
    """``pick`` keeps within the loss and takes at most ``high``; no picks within the loss take ``low`` or less, as far
    as ``bound`` is proven."""

    def __init__(
        self, table: ChoiceTable, budget: Budget, solve: Callable[[ChoiceTable, Ints], Outcome], most: float
    ) -> None:
        self.table, self.budget, self.solve, self.most = table, budget, solve, most
        # Least loss, and of equal ones the most saving.
        saving = np.where(table.loss <= 0, table.saving, -np.inf)
        self.pick = saving.argmax(axis=1).astype(np.int64)
        self.high = table.slowest(self.pick, budget)
        fastest = table.most_saving()
        self.low = self.bound = table.slowest(fastest, budget)
        if table.objective(fastest) <= most:
            self.pick, self.high = fastest, self.low

    def within(self, time: float) -> ChoiceTable:
        """The problem of the least loss within ``time``."""
        return replace(self.table, stage_need=self.table.costs(self.budget) - time)

    def settle(self, time: float) -> bool:
        """Move ``low`` or ``high`` to ``time`` or beyond it; False when that was not proven."""
        table = self.within(time)
        if not table.feasible(table.most_saving()):
            return self._too_fast(time, proven=True)
        relaxation = relax(table)
        pick = round_picks(table, relaxation)
        loss = table.objective(pick)
        if loss <= self.most:
            return self._possible(pick, time)
        distance = gap(table, relaxation, pick)
        if loss - distance > self.most + _ROUNDING * (abs(loss) + distance):
            return self._too_fast(time, proven=True)
        outcome = self.solve(table, pick)
        if table.objective(outcome.pick) <= self.most:
            return self._possible(outcome.pick, time)
        return self._too_fast(time, proven=outcome.bound > self.most)

    def _possible(self, pick: Ints, time: float) -> bool:
        self.pick = pick
        self.high = max(min(time, self.table.slowest(pick, self.budget)), self.low)
        return True

    def _too_fast(self, time: float, *, proven: bool) -> bool:
        self.low = time
        if proven and self.bound < time:
            self.bound = time
        return proven
