"""A lower bound: HiGHS solves the linear relaxation, and its prices give a Lagrangian bound.

The bound and the *reduced costs* of the choices are computed from the prices in float64 and hold for any prices, so
that nothing depends on HiGHS' tolerances (Everett 1963; Fisher 1981).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, hstack, vstack

from snip_megatron.solver.table import Bools, Floats, Ints, Table


@dataclass(frozen=True)
class Relaxation:
    """A lower ``bound`` of the score of every pick among the given choices. ``reduced`` [D, F] is by how much the score
    of a pick with this choice exceeds it at least, inf if the choice was not given; ``worth`` [P] is w of each phase in
    the relaxation.
    """

    bound: float
    reduced: Floats
    worth: Floats


def relax(table: Table, open_: Bools, scale: float) -> Relaxation | None:
    """Return the bound over the open choices [D, F], or None if HiGHS finds no prices.

    HiGHS sees all losses divided by ``scale``, Σ shifted loss of a typical pick. Each decision has an open choice.
    """
    rows, columns = np.nonzero(open_)
    low, high = worth_range(table)
    upper, limits = _upper_rows(table, rows, columns)
    weights = table.steps / table.steps.sum()
    if table.limit == math.inf:
        objective = np.concatenate([table.loss[rows, columns] / scale, np.zeros(len(weights))])
        last, last_limit = np.concatenate([np.zeros(len(rows)), -weights]), -table.need / float(table.steps.sum())
    else:
        objective = np.concatenate([np.zeros(len(rows)), -weights])
        last = np.concatenate([table.loss[rows, columns] / scale, np.zeros(len(weights))])
        last_limit = (table.limit - table.least) / scale
    one = coo_array((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=(len(open_), len(objective)))
    result = linprog(
        objective,
        A_ub=vstack([upper, coo_array(last[None, :])]).tocsr(),
        b_ub=np.append(limits, last_limit),
        A_eq=one.tocsr(),
        b_eq=np.ones(len(open_)),
        bounds=np.array([[0.0, 1.0]] * len(rows) + list(zip(low, high, strict=True))),
        method="highs",
    )
    if result.x is None:
        return None
    prices = np.maximum(-result.ineqlin.marginals, 0.0)
    of_rows = np.zeros((len(weights), len(table.cost)))
    of_rows[:, table.rows.active] = prices[:-1].reshape(len(weights), -1)
    if table.limit == math.inf:
        bound = _bound(table, open_, 1.0, of_rows * scale, prices[-1] * scale / table.steps.sum())
    else:
        total = float(table.steps.sum())
        bound = _bound(table, open_, prices[-1] * total / scale, of_rows * total, 1.0)
    return Relaxation(*bound, result.x[len(rows) :])


def worth_range(table: Table) -> tuple[Floats, Floats]:
    """Return the smallest and the largest w of each phase that picks which save enough can have, [P] each."""
    high = table.worth(table.savings(table.most_saving()))
    others = table.spent(high) - table.steps * high
    low = np.maximum(table.floor, (table.need - others) / table.steps)
    least = np.where(table.allowed, table.saving, np.inf).min(axis=1)
    lowest = table.worth(table.savings(np.where(table.saving == least[:, None], table.loss, np.inf).argmin(axis=1)))
    error = 1e-12 * (1 + np.abs(high))
    return np.minimum(np.maximum(low, lowest) - error, high), high + error


def _upper_rows(table: Table, rows: Ints, columns: Ints) -> tuple[coo_array, Floats]:
    """Return w − Σ saving / divisor · x ≤ offset of every phase and active row, in the order of both."""
    active = np.nonzero(table.rows.active)[0]
    at, to, values = [], [], []
    for p in range(len(table.steps)):
        for j, row in enumerate(active.tolist()):
            mine = np.nonzero(table.within(p, row)[rows])[0]
            at.append(np.full(len(mine), p * len(active) + j))
            to.append(mine)
            values.append(-table.saving[rows[mine], columns[mine]] / table.rows.divisor[row])
    phases = len(table.steps)
    shape = (phases * len(active), len(rows))
    left = coo_array((np.concatenate(values), (np.concatenate(at), np.concatenate(to))), shape=shape)
    right = np.repeat(np.eye(phases), len(active), axis=0)
    return hstack([left, coo_array(right)]), np.tile(table.rows.offset[active], phases)


def _bound(
    table: Table, open_: Bools, loss_price: float, row_prices: Floats, need_price: float
) -> tuple[float, Floats]:
    """Return the Lagrangian bound over the open choices [D, F] at these prices, 0 or more, and the reduced costs.

    The prices are of losses, of w ≤ Σ saving / divisor + offset [P, K + 1], and of Σ steps · w (1 under a limit).
    """
    each = row_prices / table.rows.divisor
    price = sum(on * (own[0] + own[1:][table.stage]) for on, own in zip(table.on, each, strict=True))
    assert isinstance(price, np.ndarray)
    value = np.where(open_, loss_price * np.where(open_, table.loss, 0.0) - price[:, None] * table.saving, np.inf)
    least = value.min(axis=1)
    low, high = worth_range(table)
    slope = row_prices.sum(axis=1) - need_price * table.steps
    terms = [*least.tolist(), *np.where(slope > 0, slope * low, slope * high).tolist()]
    terms += (-row_prices * table.rows.offset).ravel().tolist()
    if table.limit == math.inf:
        terms.append(need_price * table.need if need_price else 0.0)
    else:
        terms.append(-loss_price * (table.limit - table.least))
    magnitude = math.fsum(map(abs, terms)) + math.fsum((price * np.abs(table.saving).max(axis=1)).tolist())
    return math.fsum(terms) - 1e-14 * magnitude, value - least[:, None]
