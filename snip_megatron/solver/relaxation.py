"""Lagrangian relaxation: prices of saving, a lower bound of the loss, and the reduced cost of every choice.

Saving has the price p_k = λ + μ_k ≥ 0 on stage k, where λ belongs to the need of the whole model and μ_k to that of the
stage. With these prices every item decides alone: it takes the choice with the smallest loss − p·saving. For any such
prices and any feasible picks with objective z (Everett 1963; Fisher 1981)

    z = bound + Σ reduced cost of the picks + λ·(total − need) + Σ_k μ_k·(saving_k − need_k),

where all terms after the bound are ≥ 0. Their sum is the *gap*, which bounds the distance to the optimum. A choice
whose reduced cost exceeds the gap is in no better solution. No term is computed as a difference of large sums, so that
small losses keep their order beside large ones.
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
    """The result of :func:`relax`.

    Attributes:
        total_price: λ, loss per unit of saving.
        stage_price: p_k = λ + μ_k, [K].
        pick: [n], columns with the smallest priced loss at the lowest prices that suffice. They meet every need.
        cheap: [n], the same just below these prices.
        reduced: [n, F], reduced costs ≥ 0; inf if the format is not a choice.
        error: [n, F], bound of the rounding error of ``reduced``.
    """

    total_price: float
    stage_price: Floats
    pick: Ints
    cheap: Ints
    reduced: Floats
    error: Floats


def relax(table: ChoiceTable) -> Relaxation:
    """Find the prices that maximise the bound of a feasible problem, by bisection over all float64 numbers.

    At a given λ the stages are independent, and the saving of a stage does not fall with its price. The best prices are
    therefore p_k = max(own price, λ), where the own price of each stage is bisected first and λ second.
    """
    # Units are powers of two, so that nothing is rounded, and bring values near 1, so that no product overflows.
    loss_unit, saving_unit = _power_of_two(table.loss), _power_of_two(table.saving)
    loss, saving = table.loss / loss_unit, table.saving / saving_unit
    need, stage_need = table.need / saving_unit, table.stage_need / saving_unit

    demand = _Demand(loss, saving, table.stage, len(table.stages))

    own = _bisect(lambda p: demand.at(p) >= stage_need, len(table.stages), demand.settle)
    demand = _Demand(loss, saving, table.stage, len(table.stages))

    def total_saved(price: Floats) -> float:
        # Because of ties, a stage may save far more than its need just above its own price. There it counts with its
        # need.
        saved = np.where((own > 0) & (own >= price), stage_need, demand.at(np.maximum(own, price)))
        return float(saved.sum())

    total = _bisect(
        lambda p: np.array([total_saved(p) >= need]),
        1,
        lambda low, high: demand.settle(np.maximum(own, low), np.maximum(own, high)),
    )
    prices = np.maximum(own, total)
    pick = _cheapest(loss, saving, prices[table.stage])
    # Any prices ≥ 0 give a valid bound, so prices that would overflow are replaced by smaller ones.
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
    """Return an upper bound of objective(pick) − optimum, for feasible picks."""
    rows = np.arange(len(pick))
    # A rounded reduced cost may be zero although the true one is not, so its error is added for every item.
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
    """Return (reduced costs, bounds of their rounding errors), [n, F] each.

    A reduced cost is loss − p·saving minus the smallest such value of the item.
    """
    paid = prices[table.stage][:, None] * table.saving
    priced = table.loss - paid
    size = _EPS * (np.abs(np.where(table.allowed, table.loss, 0.0)) + np.abs(paid))
    best = priced.argmin(axis=1)[:, None]
    reduced = priced - np.take_along_axis(priced, best, axis=1)
    return reduced, size + np.take_along_axis(size, best, axis=1)


class _Demand:
    """The saving of every stage if each item takes its cheapest choice at given prices."""

    def __init__(self, loss: Floats, saving: Floats, stage: Ints, stages: int) -> None:
        self.loss, self.saving, self.stage = loss, saving, stage
        self.settled = np.zeros(stages)

    def at(self, prices: Floats) -> Floats:
        """Return the savings [K] at prices [K]."""
        return self.settled + self._saved(_cheapest(self.loss, self.saving, prices[self.stage]), slice(None))

    def settle(self, low: Floats, high: Floats) -> None:
        """Restrict prices to [low, high] from now on. Items that pick the same at both ends are decided."""
        low_pick = _cheapest(self.loss, self.saving, low[self.stage])
        moving = low_pick != _cheapest(self.loss, self.saving, high[self.stage])
        self.settled += self._saved(low_pick, ~moving)
        self.loss, self.saving, self.stage = self.loss[moving], self.saving[moving], self.stage[moving]

    def _saved(self, pick: Ints, rows: slice | NDArray[np.bool_]) -> Floats:
        saved = np.take_along_axis(self.saving, pick[:, None], axis=1)[rows, 0]
        return np.bincount(self.stage[rows], saved, len(self.settled))


def _cheapest(loss: Floats, saving: Floats, price: Floats) -> Ints:
    """Return the columns [n] with the smallest loss − price·saving, the first one among equals."""
    return (loss - price[:, None] * saving).argmin(axis=1)


def _bisect(
    enough: Callable[[Floats], NDArray[np.bool_]], count: int, settle: Callable[[Floats, Floats], None]
) -> Floats:
    """Return the smallest ``count`` independent prices ≥ 0 for which ``enough`` is true.

    The order of positive floats is that of their bits, so 63 halvings find adjacent numbers over the whole range. After
    every few halvings ``settle`` is called with the bounds, [count] each.
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
    """Return the power of two at or above the largest finite magnitude; 1 if all values are zero."""
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    return 2.0 ** math.frexp(largest)[1] if largest > 0 else 1.0
