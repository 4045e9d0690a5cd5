"""The exact solver: relax, remove choices that no better solution has, and solve the rest with CP-SAT.

A plain CP-SAT model of a 70B problem with six formats takes 10 s and more on 2 cores. Once a good solution is known,
the reduced costs settle nearly all of its choices. CP-SAT therefore first solves small cores, which hold the open
choices of smallest reduced cost and only have to improve the solution. Then it solves everything that is still open,
which is the proof.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from snip_megatron.solver.core import CoreResult, solve_core
from snip_megatron.solver.limits import Limits, Outcome
from snip_megatron.solver.relaxation import gap, relax
from snip_megatron.solver.rounding import round_picks
from snip_megatron.solver.search import CORES, Search
from snip_megatron.solver.stages import lift_stages
from snip_megatron.solver.table import ChoiceTable, Ints

LIFT_ABOVE = 240
"""If more choices than this are open after a round, binding stages are solved separately."""
STAGE_EFFORT = 0.5
"""Limit of the separate solve of one stage, in deterministic seconds."""


def solve_exact(table: ChoiceTable, start: Ints | None, limits: Limits) -> Outcome:
    """Solve a feasible problem.

    Args:
        table: the problem.
        start: picks of the hint, which are used if they are feasible and better than the rounded relaxation; or None.
        limits: what the search may spend.

    Returns:
        Optimal picks. If ``limits`` end the search first, the best picks found, with a bound.
    """
    if table.need == -math.inf and len(table.stages) > 1:
        return _solve_stages(table, start, limits)
    search = _Search(table, limits)
    search.offer(round_picks(table, search.relaxation))
    if start is not None:
        search.offer(start)
    search.improve(CORES[:1])
    if search.left_open() > LIFT_ABOVE:
        search.lift_stages()
    search.improve()
    return search.outcome(optimal=search.prove())


def _solve_stages(table: ChoiceTable, start: Ints | None, limits: Limits) -> Outcome:
    """Solve every stage separately, if there is no need of the whole model that couples them."""
    pick = np.zeros(len(table.ids), dtype=np.int64)
    outcomes = []
    for k, need in enumerate(table.stage_need.tolist()):
        rows = np.nonzero(table.stage == k)[0]
        part = table.part(rows, table.true_loss[rows], need)
        outcome = solve_exact(part, None if start is None else start[rows], limits)
        pick[rows] = outcome.pick
        outcomes.append(outcome)
    bound = min(table.objective(pick), math.fsum(o.bound for o in outcomes))
    return Outcome(pick, bound, all(o.optimal for o in outcomes))


class _Search(Search):
    """The search for a problem without phases."""

    def __init__(self, table: ChoiceTable, limits: Limits) -> None:
        self.table, self.relaxation = table, relax(table)
        super().__init__(table, self.relaxation.reduced - self.relaxation.error, table.most_saving(), limits)

    def gap_of(self, pick: Ints) -> float:
        return gap(self.table, self.relaxation, pick)

    def solve_core(self, open_: NDArray[np.bool_], limits: Limits, *, by_lp: bool) -> CoreResult:
        return solve_core(self.table, open_, self.pick, limits, by_lp=by_lp)

    def lift_stages(self) -> None:
        """Solve binding stages separately, which raises the bound."""

        def solve(part: ChoiceTable, start: Ints) -> Outcome:
            return solve_exact(part, start, self.limits.within(STAGE_EFFORT))

        lifts = lift_stages(self.table, self.relaxation, self.pick, solve)
        self.lift, self.lift_of = lifts.lift, self.table.stage
        self.offer(lifts.pick)
