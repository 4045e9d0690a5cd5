"""The solver for very large problems: the relaxation's picks, rounded, and its bound, which says how good they are."""

from __future__ import annotations

from snip_megatron.solver.limits import Outcome
from snip_megatron.solver.relaxation import gap, relax
from snip_megatron.solver.rounding import round_picks
from snip_megatron.solver.table import ChoiceTable, Ints


def solve_greedy(table: ChoiceTable, start: Ints | None) -> Outcome:
    """Feasible picks of a feasible problem, with a lower bound. O(items · formats), no search.

    ``start``: feasible picks, such as the previous map's; used where better.
    """
    relaxation = relax(table)
    pick = round_picks(table, relaxation)
    if start is not None and table.feasible(start) and table.difference(start, pick) < 0:
        pick = start
    distance = gap(table, relaxation, pick)
    return Outcome(pick, table.objective(pick) - distance, distance == 0.0)
