"""What one stage of one phase, a *cell*, can save with whole choices, and what that costs.

The LP meets a stage's row by a fraction of a choice. What whole choices lose beyond that grows with the savings of the
choice. A dynamic program finds the least loss of every sum of savings that is reachable. It counts savings in positions
of a grid, relative to the LP's choices, and rounds every change up, so that no solution is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from snip_megatron.solver.table import Floats, Ints

POSITIONS = 1 << 13
"""Of the grid. It spans what choices within the gap can change, so a smaller gap is counted more finely."""
_NUDGE = 1e-3  # of a position, by which every change is rounded up at least


@dataclass(frozen=True)
class Profile:
    """The least Σ (loss − price·saving) of a cell at every position of Σ saving.

    Attributes:
        saving: [W] Σ saving of a position, ascending. That of the choices counted there is not above it.
        rounded: by how much it may be below.
        least: [W] inf where no choices within the gap are counted.
        base: [m] columns of the smallest reduced costs.
        moves: an entry, its other columns and their shifts in positions, in the order of the program.
        taken: by move, for every position: 0 for the base's column, k for the k-th other column.
    """

    saving: Floats
    rounded: float
    least: Floats
    base: Ints
    moves: list[tuple[int, list[int], list[int]]]
    taken: list[NDArray[np.uint8]]

    def columns(self, position: int) -> Ints:
        """[m] columns that are counted as ``least`` of a position where it is finite."""
        columns = self.base.copy()
        for (entry, others, shifts), taken in zip(reversed(self.moves), reversed(self.taken), strict=True):
            number = int(taken[position])
            if number:
                columns[entry] = others[number - 1]
                position -= shifts[number - 1]
        return columns


def profile(loss: Floats, saving: Floats, price: float, extra: float, gap: float) -> Profile:
    """Return the profile of a cell.

    Args:
        loss: [m, F]; inf where the format is no choice.
        saving: [m, F].
        price: of savings in ``Profile.least``.
        extra: what the row of the stage pays for them beside that.
        gap: choices are not counted where their reduced costs at ``price + extra`` add up to more.
    """
    rows = np.arange(len(loss))
    priced = loss - price * saving
    reduced = priced - extra * saving
    base = reduced.argmin(axis=1)
    reduced = reduced - reduced[rows, base][:, None]
    change = saving - saving[rows, base][:, None]
    dearer = priced - priced[rows, base][:, None]
    usable = reduced <= gap
    usable[rows, base] = False
    down, up = (_reach(reduced[usable], sign * change[usable], gap) for sign in (-1, 1))
    unit = (down + up) / POSITIONS or 1.0
    start = math.ceil(down / unit) + 1
    # Every change may be rounded up by a whole position.
    size = start + math.ceil(up / unit) + int(usable.any(axis=1).sum()) + 2
    shifts = np.ceil(np.where(usable, change, 0.0) / unit + _NUDGE).astype(np.int64)
    position = np.arange(size) - start
    allowed = gap + extra * unit * (position + 1)
    least = np.full(size, np.inf)
    least[start] = 0.0
    moves, taken = [], []
    for entry in np.nonzero(usable.any(axis=1))[0].tolist():
        others = np.nonzero(usable[entry])[0].tolist()
        by = shifts[entry, others].tolist()
        least, number = _moved(least, dearer[entry, others].tolist(), by)
        least[least > allowed] = np.inf
        moves.append((entry, others, by))
        taken.append(number)
    dearest = np.cumsum(np.sort(np.where(usable, reduced, np.inf).min(axis=1)))
    changes = int(np.searchsorted(dearest, gap, side="right"))
    return Profile(
        saving=(math.fsum(saving[rows, base]) + unit * (position + _NUDGE)).astype(np.float64),
        rounded=unit * (changes * (1 + 2 * _NUDGE) + 2 * _NUDGE),
        least=least + math.fsum(priced[rows, base]),
        base=base,
        moves=moves,
        taken=taken,
    )


def _moved(least: Floats, dearer: list[float], by: list[int]) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the least after one more entry, and by position which column is taken: 0 for the base's.

    Args:
        least: [W] before this entry.
        dearer: of its other columns, what they cost more than the base's.
        by: their shifts in positions.
    """
    best, taken = least.copy(), np.zeros(len(least), dtype=np.uint8)
    for number, (cost, shift) in enumerate(zip(dearer, by, strict=True), start=1):
        to, of = (
            (slice(shift, None), slice(len(least) - shift))
            if shift > 0
            else (slice(shift or None), slice(-shift, None))
        )
        other = least[of] + cost
        better = other < best[to]
        best[to][better] = other[better]
        taken[to][better] = number
    return best, taken


def _reach(cost: Floats, gain: Floats, gap: float) -> float:
    """Return an upper bound of what choices gain together if their costs add up to ``gap`` at most.

    It is what they gain if the last choice may be taken in part.
    """
    cost, gain = cost[gain > 0], gain[gain > 0]
    order = np.argsort(cost / gain, kind="stable")
    cost, gain = cost[order], gain[order]
    spent = np.cumsum(cost)
    within = int(np.searchsorted(spent, gap, side="right"))
    reached = float(gain[:within].sum())
    if within < len(cost):
        reached += float(gain[within] / cost[within]) * (gap - float(spent[within] - cost[within]))
    return reached * (1 + 1e-9)
