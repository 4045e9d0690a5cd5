"""The solver for very large problems: rounds the relaxation, and reports its bound."""

from __future__ import annotations

from snip_megatron.solver.limits import Outcome
from snip_megatron.solver.relaxation import gap, relax
from snip_megatron.solver.rounding import round_picks
from snip_megatron.solver.table import ChoiceTable, Ints


def solve_greedy(table: ChoiceTable, start: Ints | None) -> Outcome:
    """Return feasible picks of a feasible problem, with a lower bound. Takes O(items · formats) and does not search.

    Args:
        table: the problem.
        start: picks of the hint, which are used if they are feasible and better; or None.
    """
    relaxation = relax(table)
    pick = round_picks(table, relaxation)
    if start is not None and table.feasible(start) and table.difference(start, pick) < 0:
        pick = start
    distance = gap(table, relaxation, pick)
    return Outcome(pick, table.objective(pick) - distance, distance == 0.0)
