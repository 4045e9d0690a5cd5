"""Budgets of kind ``loss``: minimises the time of the slowest stage while Σ loss stays within a bound.

The other solvers minimise the loss within a given time, separately on every stage. This minimum does not increase with
the time, so the time is found by bisection. The relaxation's bound or its rounded picks decide most times. Only if
neither decides is a time solved exactly.
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
"""Two times count as equal if they differ by less than this share of the reference time."""
_ROUNDING = 1e-12


def solve_fastest(table: ChoiceTable, budget: Budget, solve: Callable[[ChoiceTable, Ints], Outcome]) -> Outcome | None:
    """Return the picks with the smallest time, or None if no picks keep Σ loss within the budget.

    The bound of the outcome is a lower bound of the time. ``optimal`` holds up to :data:`RESOLUTION`.

    Args:
        table: the choices.
        budget: a budget of kind ``loss``.
        solve: takes (table, feasible picks) and minimises Σ loss.
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
    """The interval of times that contains the smallest one.

    ``pick`` keeps Σ loss within the budget in a time of at most ``high``. No picks within the budget take ``low`` or
    less; this is proven up to ``bound``.
    """

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
        """Return the problem of the least loss within ``time``."""
        return replace(self.table, stage_need=self.table.costs(self.budget) - time)

    def settle(self, time: float) -> bool:
        """Move ``low`` up to ``time``, or ``high`` down to it. Returns False if this was not proven."""
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
