"""The search: relax, round, remove what no better solution has, and solve growing cores until the gap is proven."""

import math
from dataclasses import dataclass, replace

import numpy as np

from snip_megatron.solver.core import Limits, solve_core
from snip_megatron.solver.relaxation import Relaxation, relax
from snip_megatron.solver.rounding import first_picks, mend_picks
from snip_megatron.solver.table import GAP, Ints, Table

_CORES = (100, 400, 1600, math.inf)
_CORE_EFFORT = 0.25
"""Deterministic seconds of all cores but the last."""
_PROBE_EFFORT = 0.5
_FINER = 1e-3  # if rounding lowers Σ loss below this share of it, the relaxation is solved again in the new scale


@dataclass(frozen=True)
class Outcome:
    """The best picks found, which meet the budget; a lower bound of their score; and their certified gap."""

    pick: Ints
    bound: float
    gap: float


def search(table: Table, limits: Limits, *, exact: bool) -> Outcome | None:
    """Return the best picks found, by CP-SAT within ``limits`` if ``exact``, or None if none meet the budget."""
    if table.limit < math.inf:
        return _fastest(table, limits, exact=exact)
    start = first_picks(table)
    return None if start is None else _Search(table, start, limits, exact=exact).run()


def _fastest(table: Table, limits: Limits, *, exact: bool) -> Outcome | None:
    """Return the picks with the largest Σ steps · w within the limit of Σ loss; of equals some with the least loss.

    The relaxation bounds the largest. Needs below this bound are tried, near ones first, by rounding and then by cores,
    until the largest that can be met is known up to the gap. CP-SAT with the limit as a constraint took 10 s and more.
    """
    if table.least > table.limit:
        return None
    best, fastest = table.loss.argmin(axis=1), table.most_saving()
    if table.total_loss(fastest) <= table.limit:
        best = fastest
    low, proven, total = table.spends(best), table.spends(fastest), float(table.steps.sum())
    relaxation = relax(table, table.allowed, table.limit - table.least or 1.0) if low < proven else None
    proven = proven if relaxation is None else min(proven, -relaxation.bound)
    for by_cores in (False, True) if exact else (False,):
        high, step = proven, GAP * (total - proven)
        enough = table.goal if by_cores else GAP
        while high - low > enough * (total - low) and not limits.over:
            need = max(high - step, (low + high) / 2)
            asked = replace(table, need=need, limit=math.inf)
            start = first_picks(asked)
            if start is not None:
                search = _Search(asked, start, limits, exact=by_cores)
                found = search.run(enough=table.limit - table.least, effort=_PROBE_EFFORT)
                if table.total_loss(found.pick) <= table.limit:
                    best, low = found.pick, table.spends(found.pick)
                    continue
                if found.bound > table.limit - table.least:
                    proven = min(proven, need)
            high, step = need, 4 * step
    last = _Search(replace(table, need=low, limit=math.inf), best, limits, exact=exact)
    pick = last.run(effort=_PROBE_EFFORT).pick
    return Outcome(pick, -proven, (proven - low) / (total - low) if proven > low else 0.0)


class _Search:
    """The picks of least Σ shifted loss so far, this sum as their ``score``, and a lower bound of that of all picks."""

    def __init__(self, table: Table, pick: Ints, limits: Limits, *, exact: bool) -> None:
        self.table, self.limits, self.exact = table, limits, exact
        self.pick, self.score, self.bound = pick, table.shifted_loss(pick), 0.0
        self.relaxation: Relaxation | None = None

    def run(self, enough: float = math.nan, effort: float = math.inf) -> Outcome:
        """Search until the gap, or what ``enough`` asks, is proven; ``effort`` is that of the last core."""
        self.enough, self.effort = enough, effort
        self._relax()
        if self.exact and self.relaxation is not None:
            for size in _CORES:
                if self._done() or self.limits.over or self._solve_core(self.relaxation, size):
                    break
        return Outcome(self.pick, min(self.bound, self.score), self._gap())

    def _gap(self) -> float:
        return (self.score - self.bound) / self.score if self.score > self.bound else 0.0

    def _done(self) -> bool:
        return self._gap() <= self.table.goal or self.score <= self.enough or self.bound > self.enough

    def _offer(self, pick: Ints) -> bool:
        """Take the picks if they are better. Returns whether they are feasible."""
        feasible = self.table.saves_enough(pick)
        score = self.table.shifted_loss(pick)
        if feasible and score < self.score:
            self.pick, self.score = pick, score
        return feasible

    def _relax(self) -> None:
        """Solve the relaxation, and round it. Losses that are too large for any better solution are left out."""
        while not self._done():
            before = self.score
            open_ = self.table.loss <= before
            relaxation = relax(self.table, open_, before)
            if relaxation is None:
                return
            self.relaxation, self.bound = relaxation, max(self.bound, relaxation.bound)
            near = relaxation.reduced.argmin(axis=1)
            self._offer(mend_picks(self.table, near, relaxation.worth, self.pick))
            if not self.score <= _FINER * before:
                return

    def _solve_core(self, relaxation: Relaxation, size: float) -> bool:
        """Solve the ``size`` open choices of least reduced cost. Returns whether these are all that are open."""
        lowest = relaxation.bound + relaxation.reduced
        whole = end = self.score * (1 - 0.9 * self.table.goal)  # choices from here on gain less than the gap
        best = relaxation.reduced == 0.0  # one or more of each decision, which a core always has
        core = (lowest < end) | best
        if core.sum() - best.sum() > size:
            end = float(np.sort(lowest[core & ~best])[int(size)])
            core = (lowest < end) | best
        beyond = float(lowest[~core].min(initial=math.inf))
        core[np.arange(len(core)), self.pick] = True
        effort = self.effort if end == whole else _CORE_EFFORT
        pick, bound = solve_core(self.table, core, self.pick, self.limits, effort=effort, gap=self.table.goal / 2)
        self.bound = max(self.bound, min(bound, beyond))
        if pick is not None and not self._offer(pick):  # it misses a need by rounding
            worth = self.table.worth(self.table.savings(pick))
            self._offer(mend_picks(self.table, pick, worth, self.pick))
        return end == whole
