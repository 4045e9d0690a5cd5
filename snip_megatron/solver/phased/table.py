"""A phased problem as arrays, and what a set of picks is worth in every phase.

Every constraint is about the *value* of a row in a phase: a row is everything, or one stage, and its value is
Σ saving / divisor + offset. A phase is worth the smallest of its rows; Σ steps·worth must reach a need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision import Format
from snip_megatron.solver.phased.decisions import Decision
from snip_megatron.solver.table import Floats, Ints

CAP = -1
"""In a selection: not a row but the most that a phase can be worth."""


@dataclass(frozen=True)
class Rows:
    """The rows of every phase; row 0 is everything, row k + 1 is stage k.

    Attributes:
        active: indices of the rows whose value counts. divisor, offset: of every row.
        cap: the most that a phase is worth, whatever is saved; may be inf.
        hard: rows that cost nothing: what is saved there must be 0 or more.
    """

    active: tuple[int, ...]
    divisor: tuple[float, ...]
    offset: tuple[float, ...]
    cap: float
    hard: tuple[int, ...]


@dataclass(frozen=True)
class PhasedTable:
    """Arrays of one problem: D decisions, F formats, P phases, K stages.

    An *entry* is a decision in one phase and stage.

    Attributes:
        decisions: what is decided. formats: the columns. stages: the stage numbers, ascending.
        loss: [D, F] float64, shifted so that a decision's smallest loss is 0; inf where the format is no choice.
        true_loss: [D, F] as given.
        owner: [E] the decision of an entry. cell: [E] phase · K + stage; ascending.
        saving: [E, F] float64, of one step; 0 where the format is no choice.
        steps: of every phase. floor: [P] the least worth of every phase; -inf for none.
        need: the least Σ steps · worth.
    """

    decisions: tuple[Decision, ...]
    formats: tuple[Format, ...]
    stages: tuple[int, ...]
    loss: Floats
    true_loss: Floats
    owner: Ints
    cell: Ints
    saving: Floats
    steps: tuple[int, ...]
    rows: Rows
    floor: Floats
    need: float

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """[D, F] whether the format is a choice."""
        return np.isfinite(self.loss)

    def asking(self, need: float) -> PhasedTable:
        """The same problem with another need."""
        return replace(self, need=need)

    # -- picks: [D] columns ------------------------------------------------------------------------------------
    def objective(self, pick: Ints) -> float:
        """Σ loss as given, correctly rounded."""
        return math.fsum(np.take_along_axis(self.true_loss, pick[:, None], axis=1)[:, 0])

    def difference(self, pick: Ints, other: Ints) -> float:
        """objective(pick) − objective(other), exact in sign also where both sums are large."""
        changed = np.nonzero(pick != other)[0]
        return math.fsum([*self.loss[changed, pick[changed]], *-self.loss[changed, other[changed]]])

    def savings(self, pick: Ints) -> Floats:
        """[P, K + 1] Σ saving of one step by row, each correctly rounded."""
        saved = self.saving[np.arange(len(self.cell)), pick[self.owner]]
        phases, stages = len(self.steps), len(self.stages)
        ends = np.searchsorted(self.cell, np.arange(phases * stages + 1)).tolist()
        found = np.empty((phases, stages + 1))
        for p in range(phases):
            first = p * stages
            found[p, 0] = math.fsum(saved[ends[first] : ends[first + stages]])
            found[p, 1:] = [math.fsum(saved[ends[c] : ends[c + 1]]) for c in range(first, first + stages)]
        return found

    def values(self, savings: Floats) -> Floats:
        """[P, active rows] what the rows are worth at these savings."""
        rows = list(self.rows.active)
        value: Floats = savings[:, rows] / np.array(self.rows.divisor)[rows] + np.array(self.rows.offset)[rows]
        return value

    def worth(self, pick: Ints) -> Floats:
        """[P] what the phases are worth."""
        worth: Floats = self.values(self.savings(pick)).min(axis=1, initial=self.rows.cap)
        return worth

    def missed(self, pick: Ints, most: int) -> list[tuple[int, ...]]:
        """Selections, a row or ``CAP`` a phase, whose Σ steps · value is below the need; the lowest first.

        The first one is that of the rows which decide what each phase is worth, whether it is missed or not. The others
        differ from it in one phase.
        """
        weighted = []
        for steps, values in zip(self.steps, self.values(self.savings(pick)).tolist(), strict=True):
            rows = list(zip(values, self.rows.active, strict=True))
            if math.isfinite(self.rows.cap):
                rows.append((self.rows.cap, CAP))
            weighted.append(sorted((steps * value, row) for value, row in rows))
        lowest = tuple(rows[0][1] for rows in weighted)
        total = math.fsum(rows[0][0] for rows in weighted)
        others = sorted(
            (total + value - rows[0][0], (*lowest[:p], row, *lowest[p + 1 :]))
            for p, rows in enumerate(weighted)
            for value, row in rows[1:]
        )
        return [lowest, *(selection for value, selection in others[: most - 1] if value < self.need)]

    def average(self, worth: Floats) -> float:
        """Σ steps · worth."""
        return math.fsum(s * w for s, w in zip(self.steps, worth.tolist(), strict=True))

    def feasible(self, pick: Ints) -> bool:
        """Whether the picks meet every need."""
        savings = self.savings(pick)
        if self.rows.hard and bool((savings[:, list(self.rows.hard)] < 0).any()):
            return False
        worth = self.values(savings).min(axis=1, initial=self.rows.cap)
        return bool((worth >= self.floor).all()) and self.average(worth) >= self.need

    def most_saving(self) -> Ints:
        """[D] the columns that save most; of equal ones the one that loses least."""
        saved = np.where(self.allowed, self.total_saving(), -np.inf)
        best = saved >= saved.max(axis=1, keepdims=True)
        return np.where(best, self.loss, np.inf).argmin(axis=1).astype(np.int64)

    def total_saving(self) -> Floats:
        """[D, F] Σ saving of a decision over its phases and stages."""
        total = np.zeros_like(self.loss)
        np.add.at(total, self.owner, self.saving)
        return total

    def mixed(self) -> bool:
        """Whether some decision's formats save in other proportions on one stage than on another.

        Only then may the picks that save most in all miss a need that others meet.
        """
        most = self.most_saving()
        best = self.saving[np.arange(len(self.cell)), most[self.owner]]
        return bool((np.where(self.allowed[self.owner], self.saving, -np.inf) > best[:, None]).any())
