"""Rounds a relaxation to good feasible picks: resolves ties at the prices, then improves one item at a time."""

from __future__ import annotations

import numpy as np

from snip_megatron.solver.relaxation import Relaxation
from snip_megatron.solver.table import ChoiceTable, Ints

MOVES = 300


def round_picks(table: ChoiceTable, relaxation: Relaxation) -> Ints:
    """Return feasible picks [n] close to the optimum of the relaxation."""
    filled = _fill(table, relaxation)
    start = filled if table.feasible(filled) else relaxation.pick
    return improve(table, start)


def improve(table: ChoiceTable, pick: Ints, moves: int = MOVES) -> Ints:
    """Change one item at a time, the one that lowers the loss most, while every need stays met."""
    rows = np.arange(len(pick))
    pick = pick.copy()
    for _ in range(moves):
        total, per_stage = table.savings(pick)
        room = np.minimum(total - table.need, per_stage - table.stage_need)[table.stage]
        gain = table.loss[rows, pick][:, None] - table.loss
        change = table.saving - table.saving[rows, pick][:, None]
        gain[change < -room[:, None]] = 0.0
        best = int(gain.argmax())
        row, column = divmod(best, gain.shape[1])
        if gain[row, column] <= 0:
            break
        before, pick[row] = pick[row], column
        if not table.feasible(pick):  # the room above is rounded
            pick[row] = before
            break
    return pick


def _fill(table: ChoiceTable, relaxation: Relaxation) -> Ints:
    """Change items from their choice just below the prices to that just above, one by one, until the needs are met.

    All items that change at a price have the same ratio of loss to saving, so any of them may change. Changing all of
    them may save far more than is needed, since equal scores are common.
    """
    cheap, dear = relaxation.cheap, relaxation.pick
    pick = cheap.copy()
    step = table.pick_saving(dear) - table.pick_saving(cheap)
    for k in range(len(table.stages)):
        rows = np.nonzero((table.stage == k) & (cheap != dear))[0]
        saved = table.pick_saving(pick)[table.stage == k].sum()
        _take(pick, dear, rows, step, float(table.stage_need[k] - saved))
    rows = np.nonzero(pick != dear)[0]
    _take(pick, dear, rows, step, float(table.need - table.pick_saving(pick).sum()))
    return pick


def _take(pick: Ints, dear: Ints, rows: Ints, step: np.ndarray, missing: float) -> None:
    """Change as many of ``rows``, in their order, as are needed to save ``missing``."""
    if missing > 0 and len(rows):
        count = int(np.searchsorted(np.cumsum(step[rows]), missing)) + 1
        pick[rows[:count]] = dear[rows[:count]]
