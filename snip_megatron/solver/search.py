"""The search: relax, round, remove what no better solution has, and solve growing cores until the gap is proven."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from snip_megatron.solver.core import solve_core
from snip_megatron.solver.limits import GAP, Limits, Outcome
from snip_megatron.solver.relaxation import Relaxation, relax
from snip_megatron.solver.rounding import first_picks, round_picks
from snip_megatron.solver.table import Bools, Ints, Table

_CORES = (100, 400, 1600)
_FINER = 1e-3  # if rounding gains more than this factor, the relaxation is solved again in the new scale


def search(table: Table, hint: Ints | None, limits: Limits, *, exact: bool) -> Outcome | None:
    """Return the best picks found, or None if none meet the budget.

    Args:
        table: the problem.
        hint: picks to start from if they are feasible and better; or None.
        limits: what CP-SAT may spend.
        exact: whether to run CP-SAT.
    """
    start = first_picks(table)
    if start is None:
        return None
    found = _Search(table, start, limits)
    if hint is not None:
        found.offer(hint)
    found.relax()
    if exact:
        found.grow()
    if table.limit < math.inf:
        return _least_loss(table, found, limits, exact=exact)
    return found.outcome()


def _least_loss(table: Table, found: _Search, limits: Limits, *, exact: bool) -> Outcome:
    """Of the picks that are as fast as the best, return some with the least loss."""
    spent = table.spent(table.worth(table.savings(found.pick)))
    fast = replace(table, need=spent, limit=math.inf)
    last = _Search(fast, found.pick, limits)
    last.relax()
    if exact:
        last.grow()
    return replace(found.outcome(), pick=last.pick)


class _Search:
    """The best picks so far, and what is known of all others.

    Attributes:
        pick: the best picks. score: their score.
        bound: lower bound of every pick's score.
    """

    def __init__(self, table: Table, pick: Ints, limits: Limits) -> None:
        self.table, self.limits = table, limits
        self.pick, self.score = pick, table.score(pick)
        self.bound = 0.0 if table.limit == math.inf else -table.spent(table.worth(table.savings(table.most_saving())))
        self.relaxation: Relaxation | None = None

    @property
    def gap(self) -> float:
        """The certified gap of the best picks."""
        return self.table.gap(self.score, self.bound)

    def offer(self, pick: Ints) -> bool:
        """Take the picks if they are feasible and better."""
        if not self.table.feasible(pick):
            return False
        score = self.table.score(pick)
        if score < self.score:
            self.pick, self.score = pick, score
        return True

    def relax(self) -> None:
        """Solve the relaxation, and round it. Losses that are too large for any better solution are left out."""
        table = self.table
        while self.gap > GAP:
            before = table.shifted_loss(self.pick)
            open_ = table.allowed if table.limit < math.inf else table.allowed & (table.loss <= before)
            relaxation = relax(table, open_, before or 1.0)
            if relaxation is None:
                return
            if relaxation.bound >= self.bound or self.relaxation is None:
                self.relaxation = relaxation
                self.bound = max(self.bound, relaxation.bound)
            self.offer(round_picks(table, relaxation, self.pick))
            if table.limit < math.inf or self.score > _FINER * before:
                return

    def grow(self) -> None:
        """Solve cores of the choices with the least reduced costs. The last core holds all that are open."""
        if self.relaxation is None:
            return
        for size in (*_CORES, math.inf):
            if self.gap <= GAP or self.limits.over:
                return
            core, beyond, last = self._core(size)
            result = solve_core(self.table, core, self.pick, self.limits, share=1.0 if last else 0.5, gap=GAP / 2)
            self._learn(result.bound, beyond)
            if result.pick is not None and not self.offer(result.pick):
                again = solve_core(self.table, core, self.pick, self.limits, share=0.5, gap=GAP / 2, strict=True)
                if again.pick is not None:
                    self.offer(again.pick)
            if last:
                return

    def _good_enough(self) -> float:
        """Return the score from which on a choice cannot be part of a solution that is better by more than the gap."""
        return self.score - 0.9 * GAP * (
            self.score if self.table.limit == math.inf else self.table.steps.sum() + self.score
        )

    def _core(self, size: float) -> tuple[Bools, float, bool]:
        """Return up to ``size`` open choices of least reduced cost, the bound of all picks with another, and whether
        these are all that are open."""
        assert self.relaxation is not None
        lowest = self.relaxation.bound + self.relaxation.reduced
        end = self._good_enough()
        best = self.relaxation.reduced == 0.0  # one or more of each decision, which a core always has
        core = (lowest < end) | best
        if core.sum() - best.sum() > size:
            least = np.sort(lowest[core & ~best])
            core = (lowest < min(end, float(least[int(size)]))) | best
        beyond = float(lowest[~core].min(initial=math.inf))
        core[np.arange(len(core)), self.pick] = True
        return core, beyond, beyond >= end

    def _learn(self, bound: float, beyond: float) -> None:
        self.bound = max(self.bound, min(bound, beyond))

    def outcome(self) -> Outcome:
        """Return the best picks."""
        return Outcome(self.pick, min(self.bound, self.score), self.gap)
