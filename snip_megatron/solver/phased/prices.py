"""Prices from the LP relaxation, and what follows from any prices: a lower bound, reduced costs, a distance.

With prices u ≥ 0 on the values of rows and ν ≥ 0 on Σ steps · worth, every decision decides alone. For any such prices
and feasible picks with objective z,

    z = bound + Σ reduced cost + Σ u·(value − worth) + ν·(Σ steps·worth − need) + Σ |steps·ν − Σ u|·(distance of the
    worth from the end of its range that the sign asks for),

all terms ≥ 0 (as in ``solver/relaxation.py``). The LP only proposes the prices: the terms are computed here, in
float64, so that the bound does not rest on the LP's tolerances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from snip_megatron.solver.phased.table import PhasedTable
from snip_megatron.solver.table import Floats, Ints

_EPS = 8.0 * np.finfo(np.float64).eps
_TAKEN = 1e-9
_BALANCED = 1e-6  # prices of a phase that miss its weight by less are scaled to it
_LARGEST = 1e7  # a loss beyond this many medians counts as that in the LP


@dataclass(frozen=True)
class PhasedRelaxation:
    """Prices and what follows from them.

    Attributes:
        row_price: [P, active rows] u. hard_price: [P, hard rows]. need_price: ν.
        reduced: [D, F] reduced costs ≥ 0; inf where the format is no choice. error: [D, F] bound on their rounding.
        pick: [D] the LP's columns, fractions rounded up; they meet every need.
        fractions: decisions that the LP splits, and the column below ``pick``'s of each.
    """

    row_price: Floats
    hard_price: Floats
    need_price: float
    reduced: Floats
    error: Floats
    pick: Ints
    fractions: dict[int, int]


def relax_phased(table: PhasedTable) -> PhasedRelaxation:
    """Solve the LP relaxation of a feasible problem."""
    steps = _steps_up(table)
    solution = _solve_lp(table, steps)
    pick, fractions = _picks(table, steps, solution.fill)
    row_price, need_price = _balanced(table, solution.row_price, solution.need_price)
    reduced, error = _reduced_costs(table, row_price, solution.hard_price)
    return PhasedRelaxation(
        row_price,
        solution.hard_price,
        need_price,
        reduced,
        error,
        pick if table.feasible(pick) else table.most_saving(),
        fractions,
    )


def phased_gap(table: PhasedTable, relaxation: PhasedRelaxation, pick: Ints) -> float:
    """At least objective(pick) − optimum, for feasible picks."""
    rows = np.arange(len(pick))
    terms = [math.fsum(relaxation.reduced[rows, pick] + relaxation.error[rows, pick])]
    savings = table.savings(pick)
    values = table.values(savings)
    worth = values.min(axis=1, initial=table.rows.cap)
    terms.append(math.fsum((relaxation.row_price * (values - worth[:, None])).ravel()))
    terms.append(math.fsum((relaxation.hard_price * savings[:, list(table.rows.hard)]).ravel()))
    price = relaxation.need_price
    if price > 0:
        terms.append(price * math.fsum([*(np.array(table.steps) * worth), -table.need]))
        terms.append(_EPS * price * (math.fsum(np.array(table.steps) * np.abs(worth)) + abs(table.need)))
    low, high = range_of(table)
    uneven = relaxation.row_price.sum(axis=1) - np.array(table.steps) * price
    for p, amount in enumerate(uneven.tolist()):
        if amount:
            room = float(worth[p] - low[p] if amount > 0 else high[p] - worth[p])
            terms.append(abs(amount) * max(room, 0.0))
    size = math.fsum((relaxation.row_price * (np.abs(values) + np.abs(worth)[:, None])).ravel())
    return math.fsum([*terms, _EPS * size]) * (1 + 1e-12)


def range_of(table: PhasedTable) -> tuple[Floats, Floats]:
    """[P] the least and the most that a phase can be worth."""
    ends = []
    for extreme, none in ((np.min, np.inf), (np.max, -np.inf)):
        saved = extreme(np.where(table.allowed[table.owner], table.saving, none), axis=1)
        phases, stages = len(table.steps), len(table.stages)
        cells = np.bincount(table.cell, saved, phases * stages).reshape(phases, stages)
        values = table.values(np.column_stack([cells.sum(axis=1), cells]))
        slack = _EPS * len(saved) * (1.0 + np.abs(values).max(axis=1, initial=0.0))
        ends.append((values.min(axis=1, initial=table.rows.cap), slack))
    (low, low_slack), (high, high_slack) = ends
    return np.maximum(low - low_slack, table.floor), high + high_slack


# -- the LP ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Step:
    """Steps up the convex hull of some decisions: [n] each."""

    owner: Ints
    below: Ints
    above: Ints


@dataclass(frozen=True)
class _LpSolution:
    fill: list[Floats]
    row_price: Floats
    hard_price: Floats
    need_price: float


def _steps_up(table: PhasedTable) -> list[_Step]:
    """From the least loss to the most saving along the lower convex hull of (Σ saving, loss), all decisions at once."""
    saved = table.total_saving()
    current = _first_columns(table)
    rows = np.arange(len(current))
    steps = []
    for _ in range(len(table.formats) - 1):
        more = saved - saved[rows, current][:, None]
        dearer = table.loss - table.loss[rows, current][:, None]
        ratio = np.full_like(more, np.inf)
        np.divide(dearer, more, out=ratio, where=table.allowed & (more > 0))
        cheapest = ratio.min(axis=1, keepdims=True)
        best = np.where(ratio == cheapest, more, -np.inf).argmax(axis=1)
        moving = np.nonzero(np.isfinite(cheapest[:, 0]))[0]
        if not len(moving):
            break
        steps.append(_Step(moving, current[moving], best[moving]))
        current = current.copy()
        current[moving] = best[moving]
    return steps


def _solve_lp(table: PhasedTable, steps: list[_Step]) -> _LpSolution:
    """Minimise Σ loss over fills of the steps in [0, 1] and the worth of every phase.

    Every step of a decision has a higher ratio of loss to saving than the one before, so they are filled in order.
    """
    matrix, least = _constraints(table, steps)
    cost = np.concatenate([table.loss[s.owner, s.above] - table.loss[s.owner, s.below] for s in steps] or [np.empty(0)])
    unit = float(np.median(cost[cost > 0])) if (cost > 0).any() else 1.0
    phases, rows, hard = len(table.steps), len(table.rows.active), len(table.rows.hard)
    cap = None if math.isinf(table.rows.cap) else table.rows.cap
    floors = [None if math.isinf(x) else x for x in table.floor.tolist()]
    used = np.isfinite(least)
    result = linprog(
        np.concatenate([np.minimum(cost / unit, _LARGEST), np.zeros(phases)]),
        A_ub=-matrix[used] if used.any() else None,
        b_ub=-least[used] if used.any() else None,
        bounds=[(0, 1)] * len(cost) + [(floor, cap) for floor in floors],
        method="highs-ds",
    )
    price = np.zeros(len(least))
    fill = np.ones(len(cost))
    if result.x is not None and result.status == 0:
        fill = result.x[: len(cost)]
        price[used] = np.maximum(-result.ineqlin.marginals, 0.0) * unit
    ends = np.cumsum([0, *(len(s.owner) for s in steps)])
    return _LpSolution(
        [fill[a:b] for a, b in pairwise(ends)],
        price[: phases * rows].reshape(phases, rows),
        price[phases * rows : phases * (rows + hard)].reshape(phases, hard) / _unit_of(table),
        float(price[-1]) / sum(table.steps),
    )


def _constraints(table: PhasedTable, steps: list[_Step]) -> tuple[csr_array, Floats]:
    """The LP's matrix [constraints, steps and phases] and the least of every constraint: the rows of every phase, the
    hard rows of every phase, the need."""
    phases, stages, active = len(table.steps), len(table.stages), list(table.rows.active)
    base = table.savings(_first_columns(table))
    count = sum(len(s.owner) for s in steps)
    index, entry, gained = _gains(table, steps)
    phase, stage = table.cell[entry] // stages, table.cell[entry] % stages
    rows, columns, values, least = [], [], [], []
    for j, row in enumerate(active):
        mine = np.ones(len(entry), dtype=bool) if row == 0 else stage == row - 1
        rows += [phase[mine] * len(active) + j, np.arange(phases) * len(active) + j]
        columns += [index[mine], count + np.arange(phases)]
        values += [gained[mine] / table.rows.divisor[row], -np.ones(phases)]
    least.append(-table.values(base).ravel())
    offset = phases * len(active)
    unit = _unit_of(table)
    for j, row in enumerate(table.rows.hard):
        mine = np.ones(len(entry), dtype=bool) if row == 0 else stage == row - 1
        rows.append(offset + phase[mine] * len(table.rows.hard) + j)
        columns.append(index[mine])
        values.append(gained[mine] / unit)
    least.append(-base[:, list(table.rows.hard)].ravel() / unit)
    offset += phases * len(table.rows.hard)
    rows.append(np.full(phases, offset))
    columns.append(count + np.arange(phases))
    values.append(np.array(table.steps) / sum(table.steps))
    least.append(np.array([table.need / sum(table.steps)]))
    shape = (offset + 1, count + phases)
    matrix = csr_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=shape)
    return matrix, np.concatenate(least)


def _first_columns(table: PhasedTable) -> Ints:
    """[D] where the steps begin."""
    saved = np.where(table.loss == 0, table.total_saving(), -np.inf)
    return saved.argmax(axis=1).astype(np.int64)


def _gains(table: PhasedTable, steps: list[_Step]) -> tuple[Ints, Ints, Floats]:
    """For every step and every entry of its decision: the step's index, the entry, what is gained there."""
    indices, entries, gains, done = [], [], [], 0
    for step in steps:
        place = np.full(len(table.decisions), -1)
        place[step.owner] = np.arange(len(step.owner))
        entry = np.nonzero(place[table.owner] >= 0)[0]
        at = place[table.owner[entry]]
        indices.append(done + at)
        entries.append(entry)
        gains.append(table.saving[entry, step.above[at]] - table.saving[entry, step.below[at]])
        done += len(step.owner)
    empty = np.empty(0, dtype=np.int64)
    return (
        np.concatenate(indices or [empty]),
        np.concatenate(entries or [empty]),
        np.concatenate(gains or [np.empty(0)]),
    )


def _unit_of(table: PhasedTable) -> float:
    """A size of savings: the LP's hard rows are in this unit."""
    return float(np.abs(table.saving).max(initial=0.0)) or 1.0


def _picks(table: PhasedTable, steps: list[_Step], fill: list[Floats]) -> tuple[Ints, dict[int, int]]:
    """The columns that the fills reach, rounded up, and the split decisions with the column below."""
    pick = _first_columns(table)
    fractions: dict[int, int] = {}
    for step, share in zip(steps, fill, strict=True):
        taken = share > _TAKEN
        pick[step.owner[taken]] = step.above[taken]
        for i in np.nonzero(taken & (share < 1 - _TAKEN))[0]:
            fractions[int(step.owner[i])] = int(step.below[i])
    return pick, fractions


# -- from prices to reduced costs ------------------------------------------------------------------------------------
def cell_prices(table: PhasedTable, row_price: Floats) -> Floats:
    """Return what the active rows pay for savings in every cell, [P, K].

    Args:
        table: the problem.
        row_price: [P, active rows] prices of the rows' values.
    """
    price = np.zeros((len(table.steps), len(table.stages)))
    for j, row in enumerate(table.rows.active):
        part = row_price[:, j] / table.rows.divisor[row]
        price[:, slice(None) if row == 0 else slice(row - 1, row)] += part[:, None]
    return price


def _balanced(table: PhasedTable, row_price: Floats, need_price: float) -> tuple[Floats, float]:
    """Prices of a phase's rows that add up to its weight, where the LP's do so up to its tolerance."""
    weight = np.array(table.steps) * need_price
    total = row_price.sum(axis=1)
    near = (total > 0) & (np.abs(total - weight) <= _BALANCED * weight)
    scale = np.where(near, weight / np.where(total > 0, total, 1.0), 1.0)
    return row_price * scale[:, None], need_price


def _reduced_costs(table: PhasedTable, row_price: Floats, hard_price: Floats) -> tuple[Floats, Floats]:
    """[D, F] priced loss less the decision's smallest, and a bound on its rounding error."""
    price = cell_prices(table, row_price)
    for j, row in enumerate(table.rows.hard):
        price[:, slice(None) if row == 0 else slice(row - 1, row)] += hard_price[:, j][:, None]
    paid_each = price.ravel()[table.cell][:, None] * table.saving
    paid, size = np.zeros_like(table.loss), np.zeros_like(table.loss)
    np.add.at(paid, table.owner, paid_each)
    np.add.at(size, table.owner, np.abs(paid_each))
    entries = np.bincount(table.owner, minlength=len(table.loss))[:, None]
    priced = table.loss - paid
    error = _EPS * (1 + entries) * (np.where(table.allowed, table.loss, 0.0) + size)
    best = priced.argmin(axis=1)[:, None]
    reduced = priced - np.take_along_axis(priced, best, axis=1)
    return reduced, error + np.take_along_axis(error, best, axis=1)
