"""Good feasible picks from the LP relaxation of a phased problem."""

from __future__ import annotations

import numpy as np

from snip_megatron.solver.phased.prices import PhasedRelaxation
from snip_megatron.solver.phased.table import PhasedTable
from snip_megatron.solver.table import Floats, Ints

MOVES = 200


def rounded(table: PhasedTable, relaxation: PhasedRelaxation) -> Ints:
    """The relaxation's picks, with those decisions rounded down again that need not be up, the dearest first."""
    pick = relaxation.pick.copy()
    gains = {d: float(table.loss[d, pick[d]] - table.loss[d, below]) for d, below in relaxation.fractions.items()}
    for d in sorted(gains, key=lambda d: (-gains[d], d)):
        above, pick[d] = pick[d], relaxation.fractions[d]
        if gains[d] <= 0 or not table.feasible(pick):
            pick[d] = above
    return improve(table, pick)


def improve(table: PhasedTable, pick: Ints, moves: int = MOVES) -> Ints:
    """Change one decision at a time, the largest fall of the loss first, while every need stays met."""
    rows = np.arange(len(pick))
    pick = pick.copy()
    for _ in range(moves):
        room = _room(table, pick)[table.cell]
        entries = np.arange(len(table.cell))
        given = table.saving[entries, pick[table.owner]][:, None] - table.saving
        barred = np.zeros(table.loss.shape, dtype=bool)
        np.logical_or.at(barred, table.owner, given > room[:, None])
        gain = np.where(barred, 0.0, table.loss[rows, pick][:, None] - table.loss)
        row, column = divmod(int(gain.argmax()), gain.shape[1])
        if gain[row, column] <= 0:
            break
        before, pick[row] = pick[row], column
        if not table.feasible(pick):  # the room is rounded, and that of several phases is not one another's
            pick[row] = before
            break
    return pick


def _room(table: PhasedTable, pick: Ints) -> Floats:
    """[cells] the saving that may be given up in one phase and stage while nothing else changes."""
    savings = table.savings(pick)
    values = table.values(savings)
    worth = values.min(axis=1, initial=table.rows.cap)
    spare = (table.average(worth) - table.need) / np.array(table.steps)
    lowest = np.maximum(worth - spare, table.floor)
    phases, stages = len(table.steps), len(table.stages)
    room = np.full((phases, stages), np.inf)
    for j, row in enumerate(table.rows.active):
        own = ((values[:, j] - lowest) * table.rows.divisor[row])[:, None]
        cells = slice(None) if row == 0 else slice(row - 1, row)
        room[:, cells] = np.minimum(room[:, cells], own)
    for row in table.rows.hard:
        cells = slice(None) if row == 0 else slice(row - 1, row)
        room[:, cells] = np.minimum(room[:, cells], savings[:, row][:, None])
    return room.ravel()
