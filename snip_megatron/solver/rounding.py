"""First picks by one price, and the repair of picks that nearly meet the need."""

import math

import numpy as np

from snip_megatron.solver.table import Floats, Ints, Table

_HALVINGS = 50
_MOST_EXPONENT = 600.0
_MOST_WORK = 1e7  # trimmed choices · size of the table: a million items are not trimmed one by one


def first_picks(table: Table) -> Ints | None:
    """Return picks that meet the need, all decisions at the lowest price of savings that does; None if none do."""
    best = table.most_saving()
    if not table.saves_enough(best):
        return None
    prices = table.loss[(table.loss > 0) & table.allowed]
    savings = np.abs(table.saving[table.saving != 0])
    if not len(prices) or not len(savings):
        pick = _cheapest(table, 0.0)
        return pick if table.saves_enough(pick) else best
    steps = table.on.T @ table.steps
    low = math.log(float(prices.min()) / float(savings.max()) / float(steps.max())) - 1
    high = math.log(float(prices.max()) / float(savings.min()) / float(steps.min())) + 1
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        pick = _cheapest(table, math.exp(min(middle, _MOST_EXPONENT)) * steps[:, None])
        if table.saves_enough(pick, exact=False):
            best, high = pick, middle
        else:
            low = middle
    return best if table.saves_enough(best) else table.most_saving()


def _cheapest(table: Table, price: Floats | float) -> Ints:
    """Return the picks of least loss − price · saving; of equals those that save more."""
    value = np.where(table.allowed, table.loss - price * table.saving, np.inf)
    best = value <= value.min(axis=1, keepdims=True)
    return np.where(best, table.saving, -np.inf).argmax(axis=1).astype(np.int64)


def mend_picks(table: Table, pick: Ints, worth: Floats, start: Ints) -> Ints:
    """Return feasible picks near ``pick`` whose phases are worth this, [P], or more; ``start`` if there are none."""
    worth = np.maximum(worth, table.floor)
    worth = worth + max(0.0, table.need - table.spent(worth)) / table.steps.sum()
    needs = np.where(table.rows.active, (worth[:, None] - table.rows.offset) * table.rows.divisor, -np.inf)
    needs[:, table.rows.active] *= 1 + np.sign(needs[:, table.rows.active]) * 1e-13
    repaired = _repair(table, pick.copy(), needs)
    if repaired is None:
        return start
    trimmed = _trim(table, repaired, needs)
    return trimmed if table.saves_enough(trimmed) else start


def _repair(table: Table, pick: Ints, needs: Floats) -> Ints | None:
    """Change picks, the cheapest for what they save first, until Σ saving meets ``needs`` [P, K + 1]."""
    for _ in range(table.loss.size):
        short = np.maximum(needs - table.savings(pick, exact=False), 0.0)
        if not short.any():
            return pick
        more = table.saving - np.take_along_axis(table.saving, pick[:, None], axis=1)
        gain = _gain(table, np.maximum(more, 0.0), short)
        cost = np.where(table.allowed, table.loss - np.take_along_axis(table.loss, pick[:, None], axis=1), np.inf)
        ratio = np.where((gain > 0) & table.allowed, np.maximum(cost, 0.0) / np.where(gain > 0, gain, 1.0), np.inf)
        column = ratio.argmin(axis=1)
        each = np.take_along_axis(ratio, column[:, None], axis=1)[:, 0]
        order = np.argsort(each, kind="stable")
        order = order[np.isfinite(each[order])]
        if not len(order):
            return None
        saved = np.cumsum(gain[order, column[order]])
        count = max(1, int(np.searchsorted(saved, 0.5 * float((short / table.rows.divisor).sum()))))
        pick[order[:count]] = column[order[:count]]
    return None


def _gain(table: Table, more: Floats, short: Floats) -> Floats:
    """Return how much of what is short more savings [D, F] make up for, in shares of the rows' divisors."""
    gain = np.zeros_like(more)
    for on, own in zip(table.on, short, strict=True):
        total = np.minimum(more, own[0]) / table.rows.divisor[0]
        stage = np.minimum(more, own[1:][table.stage][:, None]) / table.rows.divisor[1:][table.stage][:, None]
        gain += on[:, None] * (total + stage)
    return gain


def _trim(table: Table, pick: Ints, needs: Floats) -> Ints:
    """Change picks to choices of less loss, the largest difference first, while Σ saving meets ``needs``."""
    savings = table.savings(pick, exact=False)
    for _ in range(1 + int(_MOST_WORK / table.loss.size)):
        spare = savings - needs
        room = np.full(len(pick), np.inf)
        for on, own in zip(table.on, spare, strict=True):
            room = np.where(on, np.minimum(room, np.minimum(own[0], own[1:][table.stage])), room)
        less = np.take_along_axis(table.saving, pick[:, None], axis=1) - table.saving
        gain = np.take_along_axis(table.loss, pick[:, None], axis=1) - table.loss
        gain = np.where(table.allowed & (less <= room[:, None]), gain, -np.inf)
        row, column = divmod(int(gain.argmax()), gain.shape[1])
        if gain[row, column] <= 0:
            break
        first, last = table.span[row]
        savings[first:last, [0, 1 + table.stage[row]]] -= less[row, column]
        pick[row] = column
    return pick
