"""Windows of what a phase is worth, and a lower bound for each.

Between two sums that the binding stages of a phase can reach with whole choices, more worth costs those stages nothing:
they save the higher sum already. A *window* is such a range of a phase's worth. Within it every binding stage costs
what its profile says, all other savings have the price of the phase's total, and the worth has the price of the need:

    Σ loss ≥ Σ of the binding stages' least (loss − price·saving) at the window's sums
             + Σ of the other decisions' least (loss − price·saving) + (total's price − steps·need's price)·worth.

The bound holds for any prices. Tables of it are made for a grid of both prices; ``combinations.py`` combines the
phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from snip_megatron.solver.phased.cells import Profile, profile
from snip_megatron.solver.phased.prices import PhasedRelaxation, cell_prices, range_of
from snip_megatron.solver.phased.table import PhasedTable
from snip_megatron.solver.table import Floats, Ints

STEP = 0.003
"""Between prices of the grid, as a part of the price. Bounds lose about the square of the distance to the best one."""
NEED_PRICES = np.arange(-4.0, 5.0)
"""Steps from the LP's price of the need."""
BELOW, ABOVE = 13, 20
"""Steps below the LP's price of a total and above that of the need."""
MOST_ENTRIES = 40_000
"""Of a table, to bound the time of the profiles. Where decisions are that many, each is small beside the gap."""
_PRICED = 1e-9


@dataclass(frozen=True)
class Cell:
    """A binding stage in a phase.

    Attributes:
        entries: [m] of the table. loss, saving: [m, F] theirs. profile: the cell's.
        price: of savings in the profile. extra: of the stage's row beside it.
        divisor, offset: of the row.
        place: [A] counted positions. worth: [A] of the row there, ascending.
        least: [prices, A] by price of the total: least Σ (loss − price·saving) from here on.
    """

    entries: Ints
    loss: Floats
    saving: Floats
    profile: Profile
    price: float
    extra: float
    divisor: float
    offset: float
    place: Ints
    worth: Floats
    least: Floats


@dataclass(frozen=True)
class PhaseWindows:
    """Windows of one phase.

    Attributes:
        low, high: [N] ends of the windows.
        prices: [prices] grid of the total's prices.
        bound: [need's prices, N]. chosen: the index of the total's price that gives it.
        cells: the binding stages. first: [cells, N] index into a cell's arrays where a window's sums begin.
        entries: [m] of the other decisions. loss, saving: [m, F] theirs.
    """

    low: Floats
    high: Floats
    prices: Floats
    bound: Floats
    chosen: Ints
    cells: list[Cell]
    first: Ints
    entries: Ints
    loss: Floats
    saving: Floats


@dataclass(frozen=True)
class Windows:
    """Windows of all phases.

    Attributes:
        phases: of every phase. paid: [need's prices] what the need adds to the phases' bounds.
        slack: bound on rounding errors of a sum of bounds.
    """

    phases: list[PhaseWindows]
    paid: Floats
    slack: float


def find_windows(table: PhasedTable, relaxation: PhasedRelaxation, gap: float) -> Windows | None:
    """Return windows that hold every solution within ``gap`` of the relaxation's bound.

    Returns None if no stage binds, if rows that cost nothing have a price, or if the table has too many entries.
    """
    price = relaxation.need_price
    if not price > 0 or not math.isfinite(table.need) or (relaxation.hard_price > 0).any():
        return None
    if len(table.owner) > MOST_ENTRIES:
        return None
    gap *= 1 + 1e-9
    losses = _losses_of_entries(table, relaxation)
    low, high = range_of(table)
    need: Floats = price * (1.0 + STEP * NEED_PRICES)
    phases = [
        _of_phase(table, relaxation, losses, p, need, (float(low[p]), float(high[p])), gap)
        for p in range(len(table.steps))
    ]
    if not any(phase.cells for phase in phases):
        return None
    size = sum(_size(phase) for phase in phases) + float(need[-1]) * (
        abs(table.need) + float((np.array(table.steps) * np.maximum(np.abs(low), np.abs(high))).sum())
    )
    return Windows(phases, need * table.need, 1e-12 * size)


def _losses_of_entries(table: PhasedTable, relaxation: PhasedRelaxation) -> Floats:
    """Return losses of entries, [E, F], whose sum over the entries of a decision is the decision's loss.

    An entry has the loss that the LP pays for its savings, and an equal part of what remains.
    """
    count = np.bincount(table.owner, minlength=len(table.loss))
    loss = table.loss[table.owner]
    if (count <= 1).all():
        return loss
    paid = cell_prices(table, relaxation.row_price).ravel()[table.cell][:, None] * table.saving
    total = np.zeros_like(table.loss)
    np.add.at(total, table.owner, paid)
    several = (count > 1)[table.owner]
    split: Floats = paid + (loss - total[table.owner]) / count[table.owner][:, None]
    return np.where(several[:, None], split, loss)


def _of_phase(
    table: PhasedTable,
    relaxation: PhasedRelaxation,
    losses: Floats,
    p: int,
    need: Floats,
    ends: tuple[float, float],
    gap: float,
) -> PhaseWindows:
    """Return the windows of phase ``p``.

    Args:
        table, relaxation, gap: as in :func:`find_windows`.
        losses: [E, F] of entries.
        p: the phase.
        need: grid of the need's prices.
        ends: the least and the most that the phase can be worth.
    """
    rows, stages = table.rows, len(table.stages)
    row_price = dict(zip(rows.active, relaxation.row_price[p].tolist(), strict=True))
    weight = table.steps[p] * relaxation.need_price
    has_total = 0 in rows.active
    divisor = rows.divisor[0]
    total = row_price.get(0, 0.0) / divisor
    prices = _grid(total * divisor / weight) * weight / divisor if has_total else np.zeros(1)
    mine = np.nonzero(table.cell // stages == p)[0]
    stage = table.cell[mine] % stages
    own = cell_prices(table, relaxation.row_price)[p]
    binding = _binding(table, losses, mine, row_price, own, prices, weight, gap)
    cells = [_cell(table, losses, mine[stage == row - 1], row, total, row_price[row], prices, gap) for row in binding]
    rest = mine[~np.isin(stage + 1, binding)]
    value = least_of(losses[rest], table.saving[rest], prices)
    low, high = _ends(cells, ends)
    first = np.array([np.searchsorted(c.worth, low, side="right") for c in cells], dtype=np.int64).reshape(-1, len(low))
    bound = value[:, None] + sum((c.least[:, at] for c, at in zip(cells, first, strict=True)), np.zeros(len(low)))
    found, chosen = np.empty((len(need), len(low))), np.empty((len(need), len(low)), dtype=np.int64)
    for v, price in enumerate((need * table.steps[p]).tolist()):
        slope = prices * (divisor if has_total else 0.0) - price
        slope[np.abs(slope) < _PRICED * price] = 0.0  # neighbours on the grid are much further apart
        each = bound + np.minimum(slope[:, None] * low, slope[:, None] * high)
        chosen[v] = each.argmax(axis=0)
        found[v] = each[chosen[v], np.arange(len(low))]
    return PhaseWindows(low, high, prices, found, chosen, cells, first, rest, losses[rest], table.saving[rest])


def _grid(share: float) -> Floats:
    """Return prices of a total, as parts of the weight of its phase. They are spaced as those of the need are.

    Args:
        share: the LP's price of the total, as such a part.
    """
    lowest = math.floor((min(max(share, 0.5), 1.0) - 1.0) / STEP) - BELOW
    grid: Floats = 1.0 + STEP * np.arange(lowest, ABOVE + 1, dtype=np.float64)
    return grid


def _binding(
    table: PhasedTable,
    losses: Floats,
    mine: Ints,
    row_price: dict[int, float],
    own: Floats,
    prices: Floats,
    weight: float,
    gap: float,
) -> list[int]:
    """Return the rows of stages that have a price, or whose LP choices save too little for what the phase may be worth.

    Bounds hold whichever stages are chosen here.

    Args:
        table, losses, gap: as in :func:`_of_phase`.
        mine: entries of the phase.
        row_price: row → its price in the phase.
        own: [K] what these rows pay for savings on every stage.
        prices: grid of the total's prices.
        weight: the price of the phase's worth.
    """
    rows, stages = table.rows, len(table.stages)
    stage = table.cell[mine] % stages
    column = (losses[mine] - own[stage][:, None] * table.saving[mine]).argmin(axis=1)
    saved = np.bincount(stage, table.saving[mine, column], stages)
    most = math.inf  # that the phase may be worth
    if 0 in rows.active:
        value = least_of(losses[mine], table.saving[mine], prices)
        slope = prices * rows.divisor[0] - weight
        above = slope > _PRICED * weight
        at_need = float(value[np.abs(slope).argmin()])
        most = float(((gap + at_need - value[above]) / slope[above]).min())
    return [
        row
        for row, price in row_price.items()
        if row > 0 and (price > _PRICED * weight or saved[row - 1] / rows.divisor[row] + rows.offset[row] < most)
    ]


def _cell(
    table: PhasedTable,
    losses: Floats,
    entries: Ints,
    row: int,
    price: float,
    row_price: float,
    prices: Floats,
    gap: float,
) -> Cell:
    """Return the cell of a stage's entries.

    Args:
        table, losses, gap: as in :func:`_of_phase`.
        entries: of the cell.
        row: of the stage.
        price: the LP's price of the total. row_price: that of the row.
        prices: grid of the total's prices.
    """
    divisor, offset = table.rows.divisor[row], table.rows.offset[row]
    loss, saving, extra = losses[entries], table.saving[entries], row_price / divisor
    found = profile(loss, saving, price, extra, gap)
    place = np.nonzero(np.isfinite(found.least))[0]
    saved = found.saving[place]
    # The sums are rounded up, which would raise what is left to pay at a lower price.
    cheaper = (price - prices)[:, None]
    least = found.least[place] + cheaper * np.where(cheaper > 0, saved - found.rounded, saved)
    least = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]
    return Cell(entries, loss, saving, found, price, extra, divisor, offset, place, saved / divisor + offset, least)


def least_of(loss: Floats, saving: Floats, prices: Floats) -> Floats:
    """Return, for every price, Σ of the rows' least (loss − price·saving)."""
    return np.array([(loss - price * saving).min(axis=1, initial=np.inf).sum() for price in prices.tolist()])


def _ends(cells: list[Cell], ends: tuple[float, float]) -> tuple[Floats, Floats]:
    """Return the lower and the upper ends of the windows between ``ends``, [N] each.

    A window ends where a binding stage's least changes.
    """
    low, high = ends[0], min([ends[1], *(float(c.worth[-1]) for c in cells)])
    changes = [c.worth[:-1][(c.least[:, 1:] != c.least[:, :-1]).any(axis=0)] for c in cells]
    inner = np.unique(np.concatenate([*changes, np.empty(0)]))
    inner = inner[(inner > low) & (inner < high)]
    if high < low:
        return np.empty(0), np.empty(0)
    return np.concatenate([[low], inner]), np.concatenate([inner, [high]])


def _size(phase: PhaseWindows) -> float:
    """Return an upper bound of the sum of the magnitudes of what is added up in a phase's bounds."""
    price = float(phase.prices[-1])
    parts = [(phase.loss, phase.saving), *((c.loss, c.saving) for c in phase.cells)]
    return math.fsum(
        float(np.abs((loss - price * saving).min(axis=1)).sum()) + price * float(np.abs(saving).max(axis=1).sum())
        for loss, saving in parts
        if len(loss)
    )
