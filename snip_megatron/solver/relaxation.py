"""Lagrangian relaxation: the price of saving on every stage, a lower bound, and how much each choice costs above it.

With prices p_k = λ + μ_k ≥ 0 (λ for the total, μ_k for stage k) every item decides alone, by loss − p·saving. For any
such prices and any feasible picks with objective z (Everett 1963; Fisher 1981)

    z = bound + Σ reduced cost of the picks + λ·(total − need) + Σ_k μ_k·(saving_k − need_k),

all terms ≥ 0. So ``gap``, the sum of the last three, bounds the distance to the optimum, and a choice whose reduced
cost exceeds it is in no better solution. Every term is computed without subtracting large sums, so that small losses
keep their order beside large ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from snip_megatron.solver.table import ChoiceTable, Floats, Ints

_TOP = int(np.array(1e300).view(np.int64))
_MOST = 2.0**930  # a price beyond which price·saving may overflow
_SETTLE_EVERY = 4  # halvings
_TIE = 2.0**-40  # ratios of loss to saving this close count as equal when picks are rounded
_EPS = 4.0 * np.finfo(np.float64).eps


@dataclass(frozen=True)
class Relaxation:
    """Prices and what follows from them.

    Attributes:
        total_price: λ, loss per unit of saving. stage_price: [K] p_k = λ + μ_k.
        pick: [n] columns with the smallest priced loss at just sufficient prices; meets every need.
        cheap: [n] the same just below those prices.
        reduced: [n, F] reduced costs ≥ 0; inf where the format is no choice.
        error: [n, F] bound on the rounding error of ``reduced``.
    """

    total_price: float
    stage_price: Floats
    pick: Ints
    cheap: Ints
    reduced: Floats
    error: Floats


def relax(table: ChoiceTable) -> Relaxation:
    """Prices that maximise the bound, by bisection over float64 itself; needs a feasible problem.

    At a given λ the stages are independent, and a stage's saving does not fall with its price. So bisecting each
    stage's own price first and then λ, with p_k = max(own price, λ), finds the best prices.
    """
    # Powers of two, so that nothing is rounded; near 1, so that no product overflows.
    loss_unit, saving_unit = _power_of_two(table.loss), _power_of_two(table.saving)
    loss, saving = table.loss / loss_unit, table.saving / saving_unit
    need, stage_need = table.need / saving_unit, table.stage_need / saving_unit

    demand = _Demand(loss, saving, table.stage, len(table.stages))

    own = _bisect(lambda p: demand.at(p) >= stage_need, len(table.stages), demand.settle)
    demand = _Demand(loss, saving, table.stage, len(table.stages))

    def total_saved(price: Floats) -> float:
        # Just above its breakpoint a stage may save far more than it needs (ties): it counts with its need there.
        saved = np.where((own > 0) & (own >= price), stage_need, demand.at(np.maximum(own, price)))
        return float(saved.sum())

    total = _bisect(
        lambda p: np.array([total_saved(p) >= need]),
        1,
        lambda low, high: demand.settle(np.maximum(own, low), np.maximum(own, high)),
    )
    prices = np.maximum(own, total)
    pick = _cheapest(loss, saving, prices[table.stage])
    # Any prices ≥ 0 bound: where float64 ends, smaller ones do.
    stage_price, total_price = (_MOST * np.minimum(p * (loss_unit / _MOST) / saving_unit, 1.0) for p in (prices, total))
    reduced, error = _reduced_costs(table, stage_price)
    return Relaxation(
        total_price=float(total_price[0]),
        stage_price=stage_price,
        pick=pick if table.feasible(pick) else table.most_saving(),
        cheap=_cheapest(loss, saving, prices[table.stage] * (1 - _TIE)),
        reduced=reduced,
        error=error,
    )


def gap(table: ChoiceTable, relaxation: Relaxation, pick: Ints) -> float:
    """At least objective(pick) − optimum, for feasible picks."""
    rows = np.arange(len(pick))
    # A rounded reduced cost may be zero where the true one is not: its error counts for every item.
    above = relaxation.reduced[rows, pick] + relaxation.error[rows, pick]
    saved = table.pick_saving(pick)
    terms = [math.fsum(above)]
    if relaxation.total_price > 0:
        terms.append(relaxation.total_price * math.fsum([*saved, -table.need]))
    for k, price in enumerate(relaxation.stage_price):
        extra = float(price) - relaxation.total_price
        if extra > 0:
            terms.append(extra * math.fsum([*saved[table.stage == k], -float(table.stage_need[k])]))
    return math.fsum(terms) * (1 + 1e-12)


def _reduced_costs(table: ChoiceTable, prices: Floats) -> tuple[Floats, Floats]:
    """[n, F] loss − p·saving less the item's smallest, and a bound on its rounding error."""
    paid = prices[table.stage][:, None] * table.saving
    priced = table.loss - paid
    size = _EPS * (np.abs(np.where(table.allowed, table.loss, 0.0)) + np.abs(paid))
    best = priced.argmin(axis=1)[:, None]
    reduced = priced - np.take_along_axis(priced, best, axis=1)
    return reduced, size + np.take_along_axis(size, best, axis=1)


class _Demand:
    """What every stage saves when each item picks its cheapest column at given prices."""

    def __init__(self, loss: Floats, saving: Floats, stage: Ints, stages: int) -> None:
        self.loss, self.saving, self.stage = loss, saving, stage
        self.settled = np.zeros(stages)

    def at(self, prices: Floats) -> Floats:
        """[K] savings at prices [K]."""
        return self.settled + self._saved(_cheapest(self.loss, self.saving, prices[self.stage]), slice(None))

    def settle(self, low: Floats, high: Floats) -> None:
        """From here on prices stay between these: items that pick the same at both ends are decided."""
        low_pick = _cheapest(self.loss, self.saving, low[self.stage])
        moving = low_pick != _cheapest(self.loss, self.saving, high[self.stage])
        self.settled += self._saved(low_pick, ~moving)
        self.loss, self.saving, self.stage = self.loss[moving], self.saving[moving], self.stage[moving]

    def _saved(self, pick: Ints, rows: slice | NDArray[np.bool_]) -> Floats:
        saved = np.take_along_axis(self.saving, pick[:, None], axis=1)[rows, 0]
        return np.bincount(self.stage[rows], saved, len(self.settled))


def _cheapest(loss: Floats, saving: Floats, price: Floats) -> Ints:
    """[n] the columns with the smallest loss − price·saving, of equal ones the first."""
    return (loss - price[:, None] * saving).argmin(axis=1)


def _bisect(
    enough: Callable[[Floats], NDArray[np.bool_]], count: int, settle: Callable[[Floats, Floats], None]
) -> Floats:
    """The smallest ``count`` independent prices ≥ 0 that are enough.

    Positive floats are ordered as their bits are: 63 halvings reach adjacent numbers over the whole range. Now and
    then ``settle`` is told the bounds, [count] each.
    """
    low = np.zeros(count, dtype=np.int64)
    high = np.where(enough(np.zeros(count)), 0, _TOP)
    halvings = 0
    while (high - low > 1).any():
        middle = low + (high - low) // 2
        ok = enough(middle.view(np.float64))
        high, low = np.where(ok, middle, high), np.where(ok, low, middle)
        halvings += 1
        if halvings % _SETTLE_EVERY == 0:
            settle(low.view(np.float64), high.view(np.float64))
    return high.view(np.float64)


def _power_of_two(values: Floats) -> float:
    """The power of two at or above the largest finite magnitude; 1 for all zero."""
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    return 2.0 ** math.frexp(largest)[1] if largest > 0 else 1.0
