"""CP-SAT on the choices of a phased problem that the relaxation left open.

A phase is worth the smallest of its rows. So Σ steps·worth meets the need exactly if it does for every *selection* of
one row a phase, and each selection is one linear constraint over the Booleans, without a variable for the worth. Only
few of all the selections matter: those that the LP's prices name, and those that picks were seen to miss. Leaving
selections out relaxes the problem, so that bounds stay bounds. With integer variables for the worth CP-SAT was seen to
take over 2 deterministic seconds for 28 open choices; with selections it takes thousandths of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from snip_megatron.solver.core import REPAIRS, CoreResult, answer
from snip_megatron.solver.integers import BITS, QUICK_BITS, integer_losses, integer_need
from snip_megatron.solver.limits import Limits
from snip_megatron.solver.phased.prices import PhasedRelaxation
from snip_megatron.solver.phased.table import CAP, PhasedTable
from snip_megatron.solver.table import Ints

Selection = tuple[int, ...]
MOST_SELECTIONS = 100
"""If the rows that have a price form no more selections than this, all of these are added at the start."""
MOST_MISSED = 16
"""Selections that are added at once if picks miss them. After every addition, CP-SAT begins anew."""
_SPENT = 1e-9  # of a phase's weight: what is left counts as nothing


def priced_selections(table: PhasedTable, relaxation: PhasedRelaxation) -> list[Selection]:
    """Selections whose constraints together bound as well as the prices do.

    All combinations of rows that have a price, where these are few. Otherwise: the prices of a phase's rows are shares
    of its weight. Walking all phases' shares at once from 0 to 1 meets one row of each at any time; a selection for
    each stretch, weighted by its length, adds up to the prices.
    """
    weights = np.array(table.steps) * relaxation.need_price
    shares = [
        [(price / weight, table.rows.active[j]) for j, price in enumerate(prices) if price > _SPENT * weight > 0]
        for prices, weight in zip(relaxation.row_price.tolist(), weights.tolist(), strict=True)
    ]
    first = table.rows.active[0] if table.rows.active else CAP
    if math.prod(max(1, len(each)) for each in shares) <= MOST_SELECTIONS:
        return list(itertools.product(*([j for _, j in each] or [first] for each in shares)))
    ends = [list(itertools.accumulate(share for share, _ in each)) for each in shares]
    places = sorted({0.0, *(end for each in ends for end in each if end < 1 - _SPENT)})
    found = [
        tuple(
            next((j for end, (_, j) in zip(of, each, strict=True) if end > place + _SPENT), first)
            for of, each in zip(ends, shares, strict=True)
        )
        for place in places
    ]
    return list(dict.fromkeys(found))


def solve_phased_core(
    table: PhasedTable,
    open_: NDArray[np.bool_],
    hint: Ints | None,
    selections: list[Selection],
    limits: Limits,
    *,
    by_lp: bool = False,
) -> CoreResult:
    """Minimise Σ loss over the open choices [D, F], starting from ``hint`` (feasible, its columns open).

    Selections that are found missing are added to ``selections``. Needs are rounded so that no feasible picks are lost:
    picks that miss one by a hair are forbidden, then needs are rounded finer, at last to the other side (as in
    ``solver/core.py``). All of these solves share ``limits``.
    """
    bound = -math.inf
    for bits in (QUICK_BITS, BITS):
        model = _Model(table, open_, hint, selections, bits=bits, strict=False)
        repairs = 0
        while repairs < REPAIRS:
            result = model.solve(limits, by_lp=by_lp)
            bound = max(bound, result.bound)
            if result.pick is None or table.feasible(result.pick):
                return replace(result, bound=bound)
            repairs += not model.select(result.pick)
    model = _Model(table, open_, hint, selections, bits=BITS, strict=True)
    strict = model.solve(limits, by_lp=by_lp)
    while strict.pick is not None and not table.feasible(strict.pick):
        if not model.select(strict.pick):
            break
        strict = model.solve(limits, by_lp=by_lp)
    pick = strict.pick if strict.pick is not None and table.feasible(strict.pick) else None
    return CoreResult(pick, bound, False)


class _Model:
    """A Boolean for every open choice of a decision with more than one; the other decisions are constants."""

    def __init__(
        self,
        table: PhasedTable,
        open_: NDArray[np.bool_],
        hint: Ints | None,
        selections: list[Selection],
        *,
        bits: int,
        strict: bool,
    ) -> None:
        self.table, self.model, self.bits, self.strict = table, cp_model.CpModel(), bits, strict
        free = open_.sum(axis=1) > 1
        self.pick = open_.argmax(axis=1) if hint is None else np.where(free, hint, open_.argmax(axis=1))
        self.rows, self.columns = np.nonzero(open_ & free[:, None])
        self.variables = [self.model.new_bool_var("") for _ in self.rows]
        for start, stop in pairwise(np.searchsorted(self.rows, [*np.nonzero(free)[0], len(free)])):
            self.model.add_exactly_one(self.variables[start:stop])
        self._collect(free)
        self.weighted: dict[tuple[int, int, Fraction], tuple[dict[int, Fraction], Fraction]] = {}
        self.selections, self.seen = selections, set(selections)
        for selection in selections:
            self._add_selection(selection)
        self._add_floors()
        self._minimise(open_, hint)

    def _collect(self, free: NDArray[np.bool_]) -> None:
        """By cell: (variable, saving) of what is open, and what the constants save."""
        table = self.table
        at = np.searchsorted(self.rows, np.arange(len(free) + 1)).tolist()
        columns = self.columns.tolist()
        cells = len(table.steps) * len(table.stages)
        self.terms: list[list[tuple[int, Fraction]]] = [[] for _ in range(cells)]
        decided: list[list[float]] = [[] for _ in range(cells)]
        for entry, (d, cell) in enumerate(zip(table.owner.tolist(), table.cell.tolist(), strict=True)):
            if not free[d]:
                decided[cell].append(float(table.saving[entry, self.pick[d]]))
            for v in range(at[d], at[d + 1]):
                saving = float(table.saving[entry, columns[v]])
                if saving:
                    self.terms[cell].append((v, Fraction(saving)))
        self.decided = [Fraction(math.fsum(values)) for values in decided]

    def _cells(self, phase: int, row: int) -> Iterator[int]:
        first = phase * len(self.table.stages)
        return iter(range(first, first + len(self.table.stages)) if row == 0 else (first + row - 1,))

    def _weighted(self, phase: int, row: int, weight: Fraction) -> tuple[dict[int, Fraction], Fraction]:
        """Return weight · saving of the variables of a row, and of its constants. Many selections share them."""
        if (phase, row, weight) not in self.weighted:
            own: dict[int, Fraction] = {}
            for cell in self._cells(phase, row):
                for v, saving in self.terms[cell]:
                    own[v] = own.get(v, Fraction(0)) + weight * saving
            constant = weight * sum((self.decided[cell] for cell in self._cells(phase, row)), Fraction(0))
            self.weighted[phase, row, weight] = own, constant
        return self.weighted[phase, row, weight]

    def _add(self, parts: list[tuple[int, int, Fraction]], need: Fraction) -> None:
        """Σ over parts (phase, row, weight) of weight · saving ≥ need."""
        savings: dict[int, Fraction] = {}
        decided = []
        for part in parts:
            own, constant = self._weighted(*part)
            decided.append(constant)
            for v, saving in own.items():
                savings[v] = savings[v] + saving if v in savings else saving
        integers = integer_need(list(savings.values()), need, decided, bits=self.bits, strict=self.strict)
        variables = [self.variables[v] for v in savings]
        self.model.add(cp_model.LinearExpr.weighted_sum(variables, integers.coefficients) >= integers.need)

    def _add_selection(self, selection: Selection) -> None:
        table, rows = self.table, self.table.rows
        if not math.isfinite(table.need):
            return
        need = Fraction(table.need)
        parts = []
        for phase, row in enumerate(selection):
            if row == CAP:
                need -= table.steps[phase] * Fraction(rows.cap)
            else:
                need -= table.steps[phase] * Fraction(rows.offset[row])
                parts.append((phase, row, Fraction(table.steps[phase]) / Fraction(rows.divisor[row])))
        self._add(parts, need)

    def _add_floors(self) -> None:
        """The phases' own needs, and rows that cost nothing."""
        rows = self.table.rows
        for phase, floor in enumerate(self.table.floor.tolist()):
            for row in rows.active if math.isfinite(floor) else ():
                need = Fraction(floor) - Fraction(rows.offset[row])
                self._add([(phase, row, 1 / Fraction(rows.divisor[row]))], need)
            for row in rows.hard:
                self._add([(phase, row, Fraction(1))], Fraction(0))

    def _minimise(self, open_: NDArray[np.bool_], hint: Ints | None) -> None:
        table = self.table
        least = np.where(open_, table.loss, np.inf).min(axis=1)
        self.base = np.where(open_, table.true_loss, np.inf).min(axis=1)
        losses = (table.loss[self.rows, self.columns] - least[self.rows]).tolist()
        integers, self.exponent = integer_losses(losses)
        exact = all(math.ldexp(m, self.exponent) == x for m, x in zip(integers, losses, strict=True))
        self.resolution = 0.0 if exact else math.ldexp(len(set(self.rows.tolist())), self.exponent)
        self.hinted = math.inf
        if hint is not None:
            hinted = (hint[self.rows] == self.columns).tolist()
            for variable, chosen in zip(self.variables, hinted, strict=True):
                self.model.add_hint(variable, chosen)
            self.hinted = sum(m for m, chosen in zip(integers, hinted, strict=True) if chosen)
        self.model.minimize(cp_model.LinearExpr.weighted_sum(self.variables, integers))

    def select(self, pick: Ints) -> bool:
        """Add selections that these picks miss; False, and the picks forbidden, where all are there already."""
        fresh = [selection for selection in self.table.missed(pick, MOST_MISSED) if selection not in self.seen]
        if not fresh:
            chosen = (pick[self.rows] == self.columns).tolist()
            self.model.add_bool_or([v.negated() for v, on in zip(self.variables, chosen, strict=True) if on])
            return False
        self.seen.update(fresh)
        self.selections += fresh
        for selection in fresh:
            self._add_selection(selection)
        return True

    def solve(self, limits: Limits, *, by_lp: bool) -> CoreResult:
        """Picks are not checked against the needs here."""
        # Cuts of so many constraints over the same Booleans were seen to double the deterministic time.
        answered = answer(self.model, self.hinted, limits, by_lp=by_lp, cuts=False)
        if answered is None:
            return CoreResult(None, -math.inf, False)
        solver, status = answered
        lowest = solver.response_proto.inner_objective_lower_bound
        bound = math.fsum([*self.base, math.ldexp(lowest, self.exponent)])
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return CoreResult(None, bound, False)
        on = np.array([solver.boolean_value(v) for v in self.variables], dtype=bool)
        pick = self.pick.copy()
        pick[self.rows[on]] = self.columns[on]
        return CoreResult(pick, bound, status == cp_model.OPTIMAL, self.resolution)
