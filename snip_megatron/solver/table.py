"""A problem as arrays: one row an item, one column a format.

Rows are sorted by id and columns by the order of ``Format``: the solution does not depend on the order of a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision import Format
from snip_megatron.solver.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SLACK = 1e-9
"""Relative slack of every saving constraint: Σ saving ≥ need, need = target·Σ cost·(1 − 1e-9), in float64."""


@dataclass(frozen=True)
class ChoiceTable:
    """Arrays of one problem; n items, F formats, K stages.

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
    def build(cls, problem: Problem) -> ChoiceTable:
        """Arrays of ``problem``."""
        items = sorted(problem.items, key=lambda item: item.id)
        formats = tuple(sorted({c.format for item in items for c in item.choices}, key=lambda f: f.code))
        column = {f: j for j, f in enumerate(formats)}
        true_loss = np.full((len(items), len(formats)), np.inf)
        saving = np.zeros_like(true_loss)
        rows = [i for i, item in enumerate(items) for _ in item.choices]
        columns = [column[c.format] for item in items for c in item.choices]
        true_loss[rows, columns] = [c.loss for item in items for c in item.choices]
        saving[rows, columns] = [c.saving for item in items for c in item.choices]
        numbers = np.array([item.stage for item in items], dtype=np.int64)
        stages, stage = np.unique(numbers, return_inverse=True)
        costs = np.array([item.cost for item in items], dtype=np.float64)
        stage_cost = np.array([math.fsum(costs[stage == k]) for k in range(len(stages))])
        cost = math.fsum(costs)
        need, stage_need = _needs(problem.budget.target, problem.budget.stage_tolerance, cost, stage_cost)
        return cls(
            ids=tuple(item.id for item in items),
            formats=formats,
            loss=true_loss - true_loss.min(axis=1, keepdims=True),
            true_loss=true_loss,
            saving=saving,
            stage=stage.astype(np.int64),
            stages=tuple(int(s) for s in stages),
            cost=cost,
            stage_cost=stage_cost,
            need=need,
            stage_need=stage_need,
        )

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """[n, F] whether the format is a choice of the item."""
        return np.isfinite(self.loss)

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

    def meets(self, target: float, tolerance: float | None, total: float, per_stage: Floats) -> bool:
        """Whether these savings would meet another budget's needs."""
        need, stage_need = _needs(target, tolerance, self.cost, self.stage_cost)
        return total >= need and bool((per_stage >= stage_need).all())

    def most_saving(self) -> Ints:
        """[n] the columns that save most: if these are infeasible, so is everything."""
        return np.where(self.allowed, self.saving, -np.inf).argmax(axis=1).astype(np.int64)


def _needs(target: float, tolerance: float | None, cost: float, stage_cost: Floats) -> tuple[float, Floats]:
    """Least Σ saving over everything and per stage."""
    need = target * cost
    stage_need = np.full(len(stage_cost), -np.inf) if tolerance is None else (target - tolerance) * stage_cost
    finite = np.where(np.isfinite(stage_need), np.abs(stage_need), 0.0)
    return need - SLACK * abs(need), stage_need - SLACK * finite
