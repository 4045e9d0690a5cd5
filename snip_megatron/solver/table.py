"""A problem as arrays: one row a decision (an item, or a group of items), one column a format.

Rows are sorted by id and columns by the order of ``Format``: the solution does not depend on the order of a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision import Format
from snip_megatron.solver.items import Budget
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.units import Unit, decision_units

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SLACK = 1e-9
"""Relative slack of every saving constraint: Σ saving ≥ need, need = target·Σ cost·(1 − 1e-9), in float64."""


@dataclass(frozen=True)
class ChoiceTable:
    """Arrays of one problem; n decisions, F formats, K stages.

    Attributes:
        ids: item ids, sorted.
        formats: the columns.
        loss: [n, F] float64, shifted so that an item's smallest loss is 0; inf where the format is no choice.
        true_loss: [n, F] float64 as given; inf where the format is no choice.
        saving: [n, F] float64; 0 where the format is no choice.
        stage: [n] int64, index into ``stages``.
        stages: the stage numbers, ascending.
        cost: Σ cost. stage_cost: [K].
        need: the least Σ saving over everything. stage_need: [K], -inf without a stage constraint.
    """

    ids: tuple[str, ...]
    formats: tuple[Format, ...]
    loss: Floats
    true_loss: Floats
    saving: Floats
    stage: Ints
    stages: tuple[int, ...]
    cost: float
    stage_cost: Floats
    need: float
    stage_need: Floats

    @classmethod
    def build(cls, problem: Problem, previous: Mapping[str, Format] | None = None, penalty: float = 0.0) -> ChoiceTable:
        """Arrays of ``problem``; a row a group, or an item that has none, each under the id of its first item.

        ``penalty`` is added to the loss of a choice for every item that takes another format than ``previous`` names.
        """
        units = decision_units(problem.items)
        formats = tuple(sorted({f for unit in units for f in unit.formats}, key=lambda f: f.code))
        column = {f: j for j, f in enumerate(formats)}
        true_loss = np.full((len(units), len(formats)), np.inf)
        saving = np.zeros_like(true_loss)
        rows = [i for i, unit in enumerate(units) for _ in unit.formats]
        columns = [column[f] for unit in units for f in unit.formats]
        true_loss[rows, columns] = [x for unit in units for x in unit.losses]
        saving[rows, columns] = [x for unit in units for x in unit.savings]
        if penalty and previous:
            true_loss += penalty * _changes(units, formats, previous)
        stages, stage = np.unique(np.array([unit.stage for unit in units], dtype=np.int64), return_inverse=True)
        costs = np.array([unit.cost for unit in units], dtype=np.float64)
        stage_cost = np.array([math.fsum(costs[stage == k]) for k in range(len(stages))])
        table = cls(
            ids=tuple(unit.ids[0] for unit in units),
            formats=formats,
            loss=true_loss - true_loss.min(axis=1, keepdims=True),
            true_loss=true_loss,
            saving=saving,
            stage=stage.astype(np.int64),
            stages=tuple(int(s) for s in stages),
            cost=math.fsum(costs),
            stage_cost=stage_cost,
            need=-np.inf,
            stage_need=np.full(len(stages), -np.inf),
        )
        return table.asking(problem.budget)

    def asking(self, budget: Budget) -> ChoiceTable:
        """The same choices under another budget; one of kind ``loss`` asks for no saving."""
        if budget.target is not None:
            need, stage_need = _share_needs(budget.target, budget.stage_tolerance, self)
        elif budget.speedup is not None:
            time = self.reference(budget) / budget.speedup
            # A stage without items that takes longer cannot be helped by any saving.
            need = np.inf if self.elsewhere(budget) > time * (1 + SLACK) else -np.inf
            stage_need = self.costs(budget) - time
            stage_need -= SLACK * np.abs(stage_need)
        else:
            need, stage_need = -np.inf, np.full(len(self.stages), -np.inf)
        return replace(self, need=need, stage_need=stage_need)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """[n, F] whether the format is a choice."""
        return np.isfinite(self.loss)

    # -- time --------------------------------------------------------------------------------------------------
    def fixed(self, budget: Budget) -> Floats:
        """[K] cost of a stage that no choice changes."""
        fixed = dict(budget.fixed_cost)
        return np.array([fixed.get(stage, 0.0) for stage in self.stages])

    def costs(self, budget: Budget) -> Floats:
        """[K] what a stage costs when nothing is saved."""
        return self.fixed(budget) + self.stage_cost

    def elsewhere(self, budget: Budget) -> float:
        """The largest fixed cost of a stage without items."""
        return max([cost for stage, cost in budget.fixed_cost if stage not in self.stages], default=0.0)

    def reference(self, budget: Budget) -> float:
        """Cost of the slowest stage when nothing is saved."""
        return max(float(self.costs(budget).max()), self.elsewhere(budget))

    def slowest(self, pick: Ints, budget: Budget) -> float:
        """Cost of the slowest stage under these picks."""
        return max(float((self.costs(budget) - self.savings(pick)[1]).max()), self.elsewhere(budget))

    def part(self, rows: Ints, loss: Floats, need: float) -> ChoiceTable:
        """The problem of some items with losses of their own [rows, F] and one need."""
        return ChoiceTable(
            ids=tuple(self.ids[i] for i in rows),
            formats=self.formats,
            loss=loss - loss.min(axis=1, keepdims=True),
            true_loss=loss,
            saving=self.saving[rows],
            stage=np.zeros(len(rows), dtype=np.int64),
            stages=(0,),
            cost=0.0,
            stage_cost=np.zeros(1),
            need=need,
            stage_need=np.full(1, -np.inf),
        )

    def pick_saving(self, pick: Ints) -> Floats:
        """[n] saving of the picked columns."""
        return np.take_along_axis(self.saving, pick[:, None], axis=1)[:, 0]

    def objective(self, pick: Ints) -> float:
        """Σ loss as given, correctly rounded."""
        return math.fsum(np.take_along_axis(self.true_loss, pick[:, None], axis=1)[:, 0])

    def difference(self, pick: Ints, other: Ints) -> float:
        """objective(pick) − objective(other), exact in sign also where both sums are large."""
        return math.fsum(
            [
                *np.take_along_axis(self.loss, pick[:, None], 1)[:, 0],
                *-np.take_along_axis(self.loss, other[:, None], 1)[:, 0],
            ]
        )

    def savings(self, pick: Ints) -> tuple[float, Floats]:
        """Σ saving over everything and [K] per stage, each correctly rounded."""
        saved = self.pick_saving(pick)
        return math.fsum(saved), np.array([math.fsum(saved[self.stage == k]) for k in range(len(self.stages))])

    def feasible(self, pick: Ints) -> bool:
        """Whether the picks meet every need."""
        total, per_stage = self.savings(pick)
        return total >= self.need and bool((per_stage >= self.stage_need).all())

    def most_saving(self) -> Ints:
        """[n] the columns that save most: if these are infeasible, so is everything."""
        return np.where(self.allowed, self.saving, -np.inf).argmax(axis=1).astype(np.int64)


def _share_needs(target: float, tolerance: float | None, table: ChoiceTable) -> tuple[float, Floats]:
    """Least Σ saving over everything and per stage."""
    need = target * table.cost
    stage_need = np.full(len(table.stages), -np.inf)
    if tolerance is not None:
        stage_need = (target - tolerance) * table.stage_cost
        stage_need -= SLACK * np.abs(stage_need)
    return need - SLACK * abs(need), stage_need


def _changes(units: Sequence[Unit], formats: Sequence[Format], previous: Mapping[str, Format]) -> Floats:
    """[n, F] how many items of a unit would change their format; items without a previous one do not count."""
    before = [[previous[i] for i in unit.ids if i in previous] for unit in units]
    return np.array([[sum(old is not f for old in known) for f in formats] for known in before], dtype=np.float64)
