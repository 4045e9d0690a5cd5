"""The search over a phased problem: relax, round, fix, prove; and the least time within a loss."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from snip_megatron.solver.core import CoreResult
from snip_megatron.solver.limits import Limits, Outcome
from snip_megatron.solver.phased.combinations import bounds_of_choices, combine, likely
from snip_megatron.solver.phased.core import priced_selections, solve_phased_core
from snip_megatron.solver.phased.prices import PhasedRelaxation, phased_gap, relax_phased
from snip_megatron.solver.phased.rounding import rounded
from snip_megatron.solver.phased.table import PhasedTable
from snip_megatron.solver.phased.windows import find_windows
from snip_megatron.solver.search import CORES, Search
from snip_megatron.solver.table import Floats, Ints

NARROW_ABOVE = 240
"""Windows of the phases' worths are made if more choices than this are open after a round."""
NARROW_ROUNDS = 12
NARROW_CORE = (100, 0.1)
"""Size and limit of the core of such a round, as in ``CORES``.

If a core leads to no better picks, the next one has twice the choices if it was solved, and twice the limit otherwise.
"""
WHOLE_BELOW, WHOLE_EFFORT = 300, 0.5
"""A round solves everything if no more choices than ``WHOLE_BELOW`` are open.

``WHOLE_EFFORT`` is its limit in deterministic seconds, which doubles from one such round to the next.
"""
RESOLUTION = 1e-9
"""Times under a ``loss`` budget that are closer than this share of the reference count as equal."""


def solve_phased_exact(table: PhasedTable, start: Ints, limits: Limits) -> Outcome:
    """Optimal picks; the best found with a bound where ``limits`` end the search first. ``start`` is feasible."""
    search = _Search(table, relax_phased(table), start, limits)
    search.offer(rounded(table, search.relaxation))
    search.improve(CORES[:1])
    if search.left_open() > NARROW_ABOVE and search.narrow():
        return search.outcome(optimal=True)
    if search.left_open() > NARROW_ABOVE:
        search.improve()
    return search.outcome(optimal=search.prove())


def solve_phased_greedy(table: PhasedTable, start: Ints) -> Outcome:
    """The relaxation's picks, rounded, and its bound. ``start`` is feasible."""
    relaxation = relax_phased(table)
    pick = rounded(table, relaxation)
    if table.difference(start, pick) < 0:
        pick = start
    distance = phased_gap(table, relaxation, pick)
    return Outcome(pick, table.objective(pick) - distance, distance == 0.0)


def find_feasible(table: PhasedTable, limits: Limits) -> Ints | None:
    """Picks that meet every need, or None; exact where no decision is mixed."""
    most = table.most_saving()
    if table.feasible(most):
        return most
    if not table.mixed():
        return None
    # Formats that save more on one stage and less on another: what saves most in all is only a guess.
    return solve_phased_core(table, table.allowed, None, [], limits).pick


class _Search(Search):
    """The search of a phased problem."""

    def __init__(self, table: PhasedTable, relaxation: PhasedRelaxation, start: Ints, limits: Limits) -> None:
        self.table, self.relaxation = table, relaxation
        self.selections = priced_selections(table, relaxation)
        super().__init__(table, relaxation.reduced - relaxation.error, start, limits)

    def gap_of(self, pick: Ints) -> float:
        return phased_gap(self.table, self.relaxation, pick)

    def solve_core(self, open_: NDArray[np.bool_], limits: Limits, *, by_lp: bool) -> CoreResult:
        return solve_phased_core(self.table, open_, self.pick, self.selections, limits, by_lp=by_lp)

    def narrow(self) -> bool:
        """Bound what every choice leads to by windows of the phases' worths, and improve among the likeliest choices.

        Better picks give closer windows, which leave fewer choices open. Returns whether the best picks were proven
        optimal.
        """
        (most, effort), whole = NARROW_CORE, WHOLE_EFFORT
        rank = None
        for _ in range(NARROW_ROUNDS):
            rank = self._bound_choices() if rank is None else rank
            if rank is None or self.limits.over:
                return False
            before = self.pick
            if self.left_open() <= max(most, WHOLE_BELOW):
                if self.attempt(self.limits.within(whole)):
                    return True
                whole *= 2
            else:
                result = self.run(self.likeliest(rank, most) & self.open_choices(), self.limits.within(effort))
                if self.pick is before:
                    optimal = result is not None and result.optimal
                    most, effort = (2 * most, effort) if optimal else (most, 2 * effort)
            if self.pick is not before:
                rank = None
        return False

    def _bound_choices(self) -> Floats | None:
        """Close the choices that windows exclude. Returns a rank of the others, or None if no windows bound them."""
        windows = find_windows(self.table, self.relaxation, self.gap)
        if windows is None:
            return None
        value = math.fsum(self.table.loss[np.arange(len(self.pick)), self.pick])
        # Rounding may put the bound of a better solution above the value, by less than the slack.
        found = combine(windows, value + 2 * windows.slack)
        if found is None:
            return None
        if found.complete:
            # Rounding may put the relaxation's bound above what the gap says, and sums of prices off their value.
            above = bounds_of_choices(self.table, windows, found) - (value - self.gap) - 2 * windows.slack
            self.reduced = np.maximum(self.reduced, above)
        self.bound = max(self.bound, math.fsum([*self.table.true_loss.min(axis=1), min(found.lowest, value)]))
        return likely(self.table, windows, found)


def solve_least_time(table: PhasedTable, most: float, limits: Limits, *, exact: bool) -> Outcome | None:
    """Picks of the highest Σ steps·worth with Σ loss ≤ ``most``, and of equal ones the least loss; None where none keep
    within it. The outcome's bound is one of −Σ steps·worth.

    Least loss does not fall with the worth asked for, so the worth is bisected; the relaxation's bound or its rounded
    picks settle most of its values.
    """
    search = _Bisection(table, most, limits, exact=exact)
    if table.objective(search.pick) > most:
        return None
    proven = True
    while search.high - search.low > RESOLUTION * sum(table.steps) and not limits.over:
        proven = search.settle(search.low + (search.high - search.low) / 2) and proven
    proven = proven and search.high - search.low <= RESOLUTION * sum(table.steps)
    final = table.asking(search.low - RESOLUTION * 1e-3 * sum(table.steps))
    outcome = search.solve(final, search.pick)
    if final.difference(outcome.pick, search.pick) < 0:
        search.pick = outcome.pick
    return Outcome(search.pick, -search.bound, proven)


class _Bisection:
    """``pick`` keeps within the loss and is worth at least ``low``; nothing within the loss is worth ``high`` or more,
    as far as ``bound`` is proven."""

    def __init__(self, table: PhasedTable, most: float, limits: Limits, *, exact: bool) -> None:
        self.table, self.most, self.limits, self.exact = table, most, limits, exact
        saved = np.where(table.loss <= 0, table.total_saving(), -np.inf)
        self.pick = saved.argmax(axis=1).astype(np.int64)
        self.low = table.average(table.worth(self.pick))
        best = table.most_saving()
        self.high = self.bound = table.average(table.worth(best))
        if table.objective(best) <= most:
            self.pick, self.low = best, self.high

    def solve(self, table: PhasedTable, start: Ints) -> Outcome:
        return solve_phased_exact(table, start, self.limits) if self.exact else solve_phased_greedy(table, start)

    def settle(self, need: float) -> bool:
        """Move ``low`` or ``high`` to ``need`` or beyond it; False when that was not proven."""
        table = self.table.asking(need)
        relaxation = relax_phased(table)
        pick = rounded(table, relaxation)
        loss = table.objective(pick)
        if loss <= self.most:
            return self._possible(pick)
        distance = phased_gap(table, relaxation, pick)
        if loss - distance > self.most + 1e-12 * (abs(loss) + distance):
            return self._too_much(need, proven=True)
        outcome = self.solve(table, pick)
        if table.objective(outcome.pick) <= self.most:
            return self._possible(outcome.pick)
        return self._too_much(need, proven=outcome.bound > self.most)

    def _possible(self, pick: Ints) -> bool:
        self.pick = pick
        self.low = min(max(self.low, self.table.average(self.table.worth(pick))), self.high)
        return True

    def _too_much(self, need: float, *, proven: bool) -> bool:
        self.high = need
        if proven:
            self.bound = min(self.bound, need)
        return proven
