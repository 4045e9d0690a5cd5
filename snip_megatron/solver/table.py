"""A problem as arrays. A row is a decision (an item, or a group of items), a column is a format.

Rows are sorted by id, and columns by the order of ``Format``, so that the solution does not depend on the order of
items in a file.
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
"""Relative slack of every saving constraint: Σ saving ≥ need, with need = target·Σ cost·(1 − 1e-9) in float64."""


@dataclass(frozen=True)
class ChoiceTable:
    """The arrays of one problem with n decisions, F formats and K stages.

    Attributes:
        ids: item ids, sorted.
        formats: the columns.
        loss: [n, F] float64, shifted so that the smallest loss of a decision is 0; inf if the format is not a choice.
        true_loss: [n, F] float64 as given; inf if the format is not a choice.
        saving: [n, F] float64; 0 if the format is not a choice.
        stage: [n] int64, index into ``stages``.
        stages: the stage numbers, ascending.
        cost: Σ cost.
        stage_cost: [K], Σ cost of each stage.
        need: the smallest Σ saving of the whole model that meets the budget.
        stage_need: [K], the same for each stage; -inf without a constraint.
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
        """Build the arrays of ``problem``.

        Each group, and each item without a group, is a row with the id of its first item. ``penalty`` is added to the
        loss of a choice for every item whose format differs from ``previous``.
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
        """Return the same choices with another budget. A budget of kind ``loss`` has no need of saving."""
        if budget.target is not None:
            need, stage_need = _share_needs(budget.target, budget.stage_tolerance, self)
        elif budget.speedup is not None:
            time = self.reference(budget) / budget.speedup
            # No saving can speed up a stage without items.
            need = np.inf if self.elsewhere(budget) > time * (1 + SLACK) else -np.inf
            stage_need = self.costs(budget) - time
            stage_need -= SLACK * np.abs(stage_need)
        else:
            need, stage_need = -np.inf, np.full(len(self.stages), -np.inf)
        return replace(self, need=need, stage_need=stage_need)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """Whether each format is a choice, bool [n, F]."""
        return np.isfinite(self.loss)

    # -- time --------------------------------------------------------------------------------------------------
    def fixed(self, budget: Budget) -> Floats:
        """Return the fixed cost of each stage, [K]."""
        fixed = dict(budget.fixed_cost)
        return np.array([fixed.get(stage, 0.0) for stage in self.stages])

    def costs(self, budget: Budget) -> Floats:
        """Return the cost of each stage if nothing is saved, [K]."""
        return self.fixed(budget) + self.stage_cost

    def elsewhere(self, budget: Budget) -> float:
        """Return the largest fixed cost of a stage that has no items."""
        return max([cost for stage, cost in budget.fixed_cost if stage not in self.stages], default=0.0)

    def reference(self, budget: Budget) -> float:
        """Return the cost of the slowest stage if nothing is saved."""
        return max(float(self.costs(budget).max()), self.elsewhere(budget))

    def slowest(self, pick: Ints, budget: Budget) -> float:
        """Return the cost of the slowest stage with these picks."""
        return max(float((self.costs(budget) - self.savings(pick)[1]).max()), self.elsewhere(budget))

    def part(self, rows: Ints, loss: Floats, need: float) -> ChoiceTable:
        """Return the problem of some rows, with other losses [rows, F] and a single need."""
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
        """Return the saving of the picked columns, [n]."""
        return np.take_along_axis(self.saving, pick[:, None], axis=1)[:, 0]

    def objective(self, pick: Ints) -> float:
        """Return Σ loss as given, correctly rounded."""
        return math.fsum(np.take_along_axis(self.true_loss, pick[:, None], axis=1)[:, 0])

    def difference(self, pick: Ints, other: Ints) -> float:
        """Return objective(pick) − objective(other). The sign is exact even if both sums are large."""
        return math.fsum(
            [
                *np.take_along_axis(self.loss, pick[:, None], 1)[:, 0],
                *-np.take_along_axis(self.loss, other[:, None], 1)[:, 0],
            ]
        )

    def savings(self, pick: Ints) -> tuple[float, Floats]:
        """Return Σ saving over all rows, and Σ saving of each stage [K], all correctly rounded."""
        saved = self.pick_saving(pick)
        return math.fsum(saved), np.array([math.fsum(saved[self.stage == k]) for k in range(len(self.stages))])

    def feasible(self, pick: Ints) -> bool:
        """Return whether the picks meet every need."""
        total, per_stage = self.savings(pick)
        return total >= self.need and bool((per_stage >= self.stage_need).all())

    def most_saving(self) -> Ints:
        """Return the columns [n] that save most. If these picks are infeasible, so are all others."""
        return np.where(self.allowed, self.saving, -np.inf).argmax(axis=1).astype(np.int64)


def _share_needs(target: float, tolerance: float | None, table: ChoiceTable) -> tuple[float, Floats]:
    """Return the smallest Σ saving of the whole model and of each stage."""
    need = target * table.cost
    stage_need = np.full(len(table.stages), -np.inf)
    if tolerance is not None:
        stage_need = (target - tolerance) * table.stage_cost
        stage_need -= SLACK * np.abs(stage_need)
    return need - SLACK * abs(need), stage_need


def _changes(units: Sequence[Unit], formats: Sequence[Format], previous: Mapping[str, Format]) -> Floats:
    """Return how many items of each unit would change their format, [n, F].

    Items without a previous format do not count.
    """
    before = [[previous[i] for i in unit.ids if i in previous] for unit in units]
    return np.array([[sum(old is not f for old in known) for f in formats] for known in before], dtype=np.float64)
