"""Combinations of a window a phase: lower bounds of their losses, and what a choice adds to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from snip_megatron.solver.phased.table import PhasedTable
from snip_megatron.solver.phased.windows import Cell, PhaseWindows, Windows, least_of
from snip_megatron.solver.table import Floats, Ints

MOST_PAIRS = 400_000
"""Pairs that are compared at once when phases are combined."""
MOST_COMBINATIONS = 50_000
_LIMITS = 8
"""Limits that are tried. Each lies half as far above the least bound as the one before."""
_LIKELIEST = 20
"""Combinations whose choices ``likely`` ranks."""
_PRICE_FACTORS = np.linspace(0.92, 1.12, 13)
"""Prices of a binding stage's savings, times the LP's, at which its choices are judged."""


@dataclass(frozen=True)
class Combinations:
    """Combinations of windows, all of those whose bound is below ``limit``.

    Attributes:
        windows: [n, P] the window of every phase. bound: [n] of Σ shifted loss.
        need: [n] index of the need's price that gives the bound.
        limit: a lower bound of all other combinations. complete: whether the others are no better than the solution.
    """

    windows: Ints
    bound: Floats
    need: Ints
    limit: float
    complete: bool

    @property
    def lowest(self) -> float:
        """A lower bound of all combinations."""
        return min(self.limit, float(self.bound.min(initial=np.inf)))


def combine(windows: Windows, most: float) -> Combinations | None:
    """Return all combinations whose bound is below a limit.

    The limit is ``most``. If too many combinations are below it, its distance from the least bound is halved, up to
    seven times. Returns None if there are too many all the same.
    """
    least = sum(phase.bound.min(axis=1, initial=np.inf) for phase in windows.phases) + windows.paid
    lowest = min(float(np.max(least)), most)
    for halving in range(_LIMITS):
        limit = lowest + (most - lowest) / 2**halving
        found = _below(windows, limit)
        if found is not None:
            bound, need, chosen = found
            return Combinations(chosen, bound - windows.slack, need, limit - windows.slack, halving == 0)
    return None


def _below(windows: Windows, limit: float) -> tuple[Floats, Ints, Ints] | None:
    """Return bounds, indices of the need's prices, and windows of all combinations below ``limit``; None for too many.

    Windows that no combination below the limit can have are removed first. Then one phase after the other is added.
    """
    bounds = [phase.bound for phase in windows.phases]
    kept = [np.arange(bound.shape[1]) for bound in bounds]
    for _ in range(2):
        for p, bound in enumerate(bounds):
            others = [b[:, k].min(axis=1, initial=np.inf) for b, k in zip(bounds, kept, strict=True)]
            rest = sum(others[:p] + others[p + 1 :], windows.paid)
            kept[p] = kept[p][(bound[:, kept[p]] + rest[:, None]).max(axis=0) < limit]
    partial, chosen = np.zeros((len(windows.paid), 1)), np.zeros((1, 0), dtype=np.int64)
    for p, bound in enumerate(bounds):
        if partial.shape[1] * len(kept[p]) > MOST_PAIRS:
            return None
        rest = sum(
            (b[:, k].min(axis=1, initial=np.inf) for b, k in zip(bounds[p + 1 :], kept[p + 1 :], strict=True)),
            windows.paid,
        )
        pairs = partial[:, :, None] + bound[:, kept[p]][:, None, :]
        first, second = np.nonzero((pairs + rest[:, None, None]).max(axis=0) < limit)
        if len(first) > MOST_COMBINATIONS:
            return None
        partial, chosen = pairs[:, first, second], np.column_stack([chosen[first], kept[p][second]])
    partial = partial + windows.paid[:, None]
    return partial.max(axis=0), partial.argmax(axis=0), chosen


def bounds_of_choices(table: PhasedTable, windows: Windows, found: Combinations) -> Floats:
    """Return, for every choice, a lower bound of Σ shifted loss of the solutions below the limit that have it, [D, F].

    It is inf if none have it.
    """
    bounds = np.full(table.loss.shape, -np.inf)
    for p, phase in enumerate(windows.phases):
        window, price, bound = _cases(phase, found, p)
        above = np.full(phase.loss.shape, np.inf)
        for at in np.unique(price).tolist():
            above = np.minimum(above, bound[price == at].min() + _dearer(phase.loss, phase.saving, phase.prices[at]))
        np.maximum.at(bounds, table.owner[phase.entries], above)
        for cell, first in zip(phase.cells, phase.first, strict=True):
            in_cell = _in_cell(cell, phase, first[window], price, phase.low[window], bound)
            np.maximum.at(bounds, table.owner[cell.entries], in_cell)
    return np.where(table.allowed, bounds, np.inf)


def _cases(phase: PhaseWindows, found: Combinations, p: int) -> tuple[Ints, Ints, Floats]:
    """Return the pairs of a window and a total's price that combinations have in phase ``p``, each once.

    Returns:
        Windows; indices of prices; the least bound of the combinations with this pair.
    """
    count = len(phase.prices)
    key, place = np.unique(
        found.windows[:, p] * count + phase.chosen[found.need, found.windows[:, p]], return_inverse=True
    )
    bound = np.full(len(key), np.inf)
    np.minimum.at(bound, place, found.bound)
    return key // count, key % count, bound


def _dearer(loss: Floats, saving: Floats, price: float) -> Floats:
    """Return priced losses, less the least of their row, [m, F]."""
    priced = loss - price * saving
    return priced - priced.min(axis=1, keepdims=True)


def _in_cell(cell: Cell, phase: PhaseWindows, first: Ints, price: Ints, low: Floats, bound: Floats) -> Floats:
    """Return bounds of solutions with a choice of a binding stage, [m, F].

    What the profile says is replaced by the stage's least at a price of its own, by this price of what it must save at
    least, and by what the choice adds. A bound is never below that of all solutions.
    """
    own = (cell.price + cell.extra) * _PRICE_FACTORS
    extra = own - phase.prices[price][:, None]
    least = (
        least_of(cell.loss, cell.saving, own) + np.maximum(extra, 0.0) * ((low - cell.offset) * cell.divisor)[:, None]
    )
    least = np.where(extra >= 0, least + (bound - cell.least[price, first])[:, None], -np.inf)
    dearer = np.array([_dearer(cell.loss, cell.saving, x) for x in own.tolist()])
    best = np.full(cell.loss.shape, np.inf)
    for one, by_price in zip(bound.tolist(), least, strict=True):
        best = np.minimum(best, np.maximum(one, (dearer + by_price[:, None, None]).max(axis=0)))
    return best


def likely(table: PhasedTable, windows: Windows, found: Combinations) -> Floats:
    """Return a rank of choices, [D, F]: the bound of the best combinations with what a choice adds to it.

    The likeliest choices have the lowest rank. Of a binding stage, only the choices that its profile counts as the
    least have a rank, and the others have inf.
    """
    rank = np.full(table.loss.shape, np.inf)
    done: set[tuple[int, int, int]] = set()
    for c in np.argsort(found.bound, kind="stable")[:_LIKELIEST].tolist():
        for p, phase in enumerate(windows.phases):
            window = int(found.windows[c, p])
            at = int(phase.chosen[found.need[c], window])
            if (p, window, at) in done:
                continue
            done.add((p, window, at))
            owner = table.owner[phase.entries]
            added = found.bound[c] + _dearer(phase.loss, phase.saving, phase.prices[at])
            np.minimum.at(rank, owner, added)
            for cell, first in zip(phase.cells, phase.first[:, window].tolist(), strict=True):
                owner, columns = table.owner[cell.entries], _least_columns(cell, first, phase.prices[at])
                np.minimum.at(rank, (owner, columns), found.bound[c])
    return rank


def _least_columns(cell: Cell, first: int, price: float) -> Ints:
    """Return the columns of the least Σ (loss − price·saving) from a place on, [m]."""
    place, counted = cell.place[first:], cell.profile
    value = counted.least[place] + (cell.price - price) * counted.saving[place]
    return counted.columns(int(place[value.argmin()]))
