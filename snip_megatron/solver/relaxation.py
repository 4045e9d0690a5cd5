"""The linear relaxation: HiGHS' prices give a Lagrangian bound, and its solution is rounded to an assignment.

The bound and the *reduced costs* of the choices are computed from the prices in float64 and hold for any prices, so
that nothing depends on HiGHS' tolerances (Everett 1963; Fisher 1981).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, hstack, vstack

from snip_megatron.solver.table import Bools, Floats, Ints, Table

_TRIM_WORK = 1e7  # trimmed choices · size of the table: a million items are not trimmed one by one


@dataclass(frozen=True)
class Relaxation:
    """The result of :func:`relax`."""

    bound: float  # a lower bound of the score of every assignment among the open choices
    # by how much the score of an assignment with this choice exceeds the bound at least, [D, F]; inf if the choice is
    # not open
    reduced: Floats
    phase_saving: Floats  # w of each phase in the relaxation, [P]


def relax(table: Table, open_: Bools, scale: float) -> Relaxation | None:
    """Solve the relaxation over the open choices [D, F], of which each decision has one. None if HiGHS has no prices.

    HiGHS sees all losses divided by ``scale``, Σ shifted loss of a typical assignment.
    """
    decisions, choices = np.nonzero(open_)
    low, high = saving_range(table)
    upper, limits = _upper_rows(table, decisions, choices)
    weights = table.steps / table.steps.sum()
    if table.limit == math.inf:
        objective = np.concatenate([table.loss[decisions, choices] / scale, np.zeros(len(weights))])
        last, last_limit = np.concatenate([np.zeros(len(decisions)), -weights]), -table.need / float(table.steps.sum())
    else:
        objective = np.concatenate([np.zeros(len(decisions)), -weights])
        last = np.concatenate([table.loss[decisions, choices] / scale, np.zeros(len(weights))])
        last_limit = (table.limit - table.least) / scale
    one_choice = coo_array(
        (np.ones(len(decisions)), (decisions, np.arange(len(decisions)))), shape=(len(open_), len(objective))
    )
    result = linprog(
        objective,
        A_ub=vstack([upper, coo_array(last[None, :])]).tocsr(),
        b_ub=np.append(limits, last_limit),
        A_eq=one_choice.tocsr(),
        b_eq=np.ones(len(open_)),
        bounds=np.array([[0.0, 1.0]] * len(decisions) + list(zip(low, high, strict=True))),
        method="highs",
    )
    if result.x is None:
        return None
    prices = np.maximum(-result.ineqlin.marginals, 0.0)
    of_rows = np.zeros((len(weights), len(table.cost)))
    of_rows[:, table.rows.counted] = prices[:-1].reshape(len(weights), -1)
    if table.limit == math.inf:
        bound = _bound(table, open_, 1.0, of_rows * scale, prices[-1] * scale / table.steps.sum())
    else:
        total = float(table.steps.sum())
        bound = _bound(table, open_, prices[-1] * total / scale, of_rows * total, 1.0)
    return Relaxation(*bound, result.x[len(decisions) :])


def saving_range(table: Table) -> tuple[Floats, Floats]:
    """Return the smallest and the largest w of each phase over the assignments that meet the need, [P] each."""
    high = table.phase_saving(table.savings(table.fastest_assignment()))
    of_other_phases = table.over_steps(high) - table.steps * high
    low = np.maximum(table.floor, (table.need - of_other_phases) / table.steps)
    least = np.where(table.allowed, table.saving, np.inf).min(axis=1)
    lowest = table.phase_saving(
        table.savings(np.where(table.saving == least[:, None], table.loss, np.inf).argmin(axis=1))
    )
    error = 1e-12 * (1 + np.abs(high))
    return np.minimum(np.maximum(low, lowest) - error, high), high + error


def _upper_rows(table: Table, decisions: Ints, choices: Ints) -> tuple[coo_array, Floats]:
    """Return w − Σ saving / divisor · x ≤ offset of every phase and counted row, in the order of both."""
    counted = np.nonzero(table.rows.counted)[0]
    i, j, values = [], [], []
    for p in range(len(table.steps)):
        for index, row in enumerate(counted.tolist()):
            within = np.nonzero(table.within(p, row)[decisions])[0]
            i.append(np.full(len(within), p * len(counted) + index))
            j.append(within)
            values.append(-table.saving[decisions[within], choices[within]] / table.rows.divisor[row])
    phases = len(table.steps)
    shape = (phases * len(counted), len(decisions))
    savings = coo_array((np.concatenate(values), (np.concatenate(i), np.concatenate(j))), shape=shape)
    right = np.repeat(np.eye(phases), len(counted), axis=0)
    return hstack([savings, coo_array(right)]), np.tile(table.rows.offset[counted], phases)


def _bound(
    table: Table, open_: Bools, loss_price: float, row_prices: Floats, need_price: float
) -> tuple[float, Floats]:
    """Return the Lagrangian bound over the open choices [D, F] at these prices, which are ≥ 0, and the reduced costs.

    The prices are of losses, of w ≤ Σ saving / divisor + offset [P, K + 1], and of Σ steps · w (1 under a limit).
    """
    each = row_prices / table.rows.divisor
    price = sum(active * (row[0] + row[1:][table.stage]) for active, row in zip(table.active, each, strict=True))
    assert isinstance(price, np.ndarray)
    value = np.where(open_, loss_price * np.where(open_, table.loss, 0.0) - price[:, None] * table.saving, np.inf)
    least = value.min(axis=1)
    low, high = saving_range(table)
    slope = row_prices.sum(axis=1) - need_price * table.steps
    terms = [*least.tolist(), *np.where(slope > 0, slope * low, slope * high).tolist()]
    terms += (-row_prices * table.rows.offset).ravel().tolist()
    if table.limit == math.inf:
        terms.append(need_price * table.need if need_price else 0.0)
    else:
        terms.append(-loss_price * (table.limit - table.least))
    magnitude = math.fsum(map(abs, terms)) + math.fsum((price * np.abs(table.saving).max(axis=1)).tolist())
    return math.fsum(terms) - 1e-14 * magnitude, value - least[:, None]


# -- rounding ----------------------------------------------------------------------------------------------------
def repair(table: Table, assignment: Ints, phase_saving: Floats, fallback: Ints) -> Ints:
    """Return a feasible assignment near ``assignment``, or ``fallback`` if none is found.

    Its phases save as ``phase_saving`` [P], all shifted by the same amount so that they just meet the need.
    """
    phase_saving = phase_saving + (table.need - table.over_steps(phase_saving)) / table.steps.sum()
    phase_saving = np.maximum(phase_saving, table.floor)
    needs = np.where(table.rows.counted, (phase_saving[:, None] - table.rows.offset) * table.rows.divisor, -np.inf)
    needs[:, table.rows.counted] *= 1 + np.sign(needs[:, table.rows.counted]) * 1e-13
    repaired = _add_savings(table, assignment.copy(), needs)
    if repaired is None:
        return fallback
    trimmed = _trim(table, repaired, needs)
    return trimmed if table.is_feasible(trimmed) else fallback


def _add_savings(table: Table, assignment: Ints, needs: Floats) -> Ints | None:
    """Change choices, the cheapest for what they save first, until Σ saving meets ``needs`` [P, K + 1]."""
    for _ in range(table.loss.size):
        short = np.maximum(needs - table.savings(assignment, exact=False), 0.0)
        if not short.any():
            return assignment
        gain = _gain(table, np.maximum(table.saving - _chosen(table.saving, assignment), 0.0), short)
        cost = np.where(table.allowed, table.loss - _chosen(table.loss, assignment), np.inf)
        ratio = np.where((gain > 0) & table.allowed, np.maximum(cost, 0.0) / np.where(gain > 0, gain, 1.0), np.inf)
        column = ratio.argmin(axis=1)
        lowest = _chosen(ratio, column)[:, 0]
        order = np.argsort(lowest, kind="stable")
        order = order[np.isfinite(lowest[order])]
        if not len(order):
            return None
        saved = np.cumsum(gain[order, column[order]])
        count = max(1, int(np.searchsorted(saved, 0.5 * float((short / table.rows.divisor).sum()))))
        assignment[order[:count]] = column[order[:count]]
    return None


def _chosen(values: Floats, assignment: Ints) -> Floats:
    """Return the value of each decision's choice, [D, 1]."""
    return np.take_along_axis(values, assignment[:, None], axis=1)


def _gain(table: Table, more: Floats, short: Floats) -> Floats:
    """Return how much of the shortage [P, K + 1] additional savings ``more`` [D, F] fill, in units of divisors."""
    gain = np.zeros_like(more)
    divisor = table.rows.divisor
    for active, row in zip(table.active, short, strict=True):
        total = np.minimum(more, row[0]) / divisor[0]
        stage = np.minimum(more, row[1:][table.stage][:, None]) / divisor[1:][table.stage][:, None]
        gain += active[:, None] * (total + stage)
    return gain


def _trim(table: Table, assignment: Ints, needs: Floats) -> Ints:
    """Change choices to those of less loss, the largest difference first, while Σ saving meets ``needs`` [P, K + 1]."""
    savings = table.savings(assignment, exact=False)
    for _ in range(1 + int(_TRIM_WORK / table.loss.size)):
        room = np.full(len(assignment), np.inf)
        for active, spare in zip(table.active, savings - needs, strict=True):
            room = np.where(active, np.minimum(room, np.minimum(spare[0], spare[1:][table.stage])), room)
        less = _chosen(table.saving, assignment) - table.saving
        gain = np.where(table.allowed & (less <= room[:, None]), _chosen(table.loss, assignment) - table.loss, -np.inf)
        row, column = divmod(int(gain.argmax()), gain.shape[1])
        if gain[row, column] <= 0:
            break
        first, last = table.span[row]
        savings[first:last, [0, 1 + table.stage[row]]] -= less[row, column]
        assignment[row] = column
    return assignment
