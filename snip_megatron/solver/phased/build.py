"""From a phased problem to its arrays."""

from __future__ import annotations

import math

import numpy as np

from snip_megatron.precision import Format
from snip_megatron.solver.items import Budget
from snip_megatron.solver.phased.decisions import Decision, list_decisions
from snip_megatron.solver.phased.problem import PhasedProblem
from snip_megatron.solver.phased.table import PhasedTable, Rows
from snip_megatron.solver.table import SLACK, Floats, Ints


def build_table(problem: PhasedProblem) -> PhasedTable:
    """The arrays of ``problem``; they do not depend on the order of its items."""
    phases = len(problem.phases)
    decisions = list_decisions(problem.items, phases)
    formats = tuple(sorted({f for d in decisions for f in d.formats}, key=lambda f: f.code))
    column = {f: j for j, f in enumerate(formats)}
    true_loss = np.full((len(decisions), len(formats)), np.inf)
    owners = [i for i, d in enumerate(decisions) for _ in d.formats]
    columns = [column[f] for d in decisions for f in d.formats]
    true_loss[owners, columns] = [x for d in decisions for x in d.losses]
    stages = tuple(sorted({item.stage for item in problem.items}))
    owner, cell, saving = _entries(decisions, stages, len(formats), column)
    costs = Costs(problem, stages)
    return PhasedTable(
        decisions=tuple(decisions),
        formats=formats,
        stages=stages,
        loss=true_loss - true_loss.min(axis=1, keepdims=True),
        true_loss=true_loss,
        owner=owner,
        cell=cell,
        saving=saving,
        steps=tuple(phase.steps for phase in problem.phases),
        rows=costs.rows(),
        floor=np.array([costs.floor(phase.target) for phase in problem.phases]),
        need=costs.need(),
    )


def _entries(
    decisions: list[Decision], stages: tuple[int, ...], formats: int, column: dict[Format, int]
) -> tuple[Ints, Ints, Floats]:
    """The owner, cell and savings of every entry, by cell."""
    place = {stage: k for k, stage in enumerate(stages)}
    owner: list[int] = []
    cell: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    for i, decision in enumerate(decisions):
        own = [column[f] for f in decision.formats]
        for p in range(*decision.phases):
            for stage, savings in decision.savings:
                rows += [len(owner)] * len(own)
                columns += own
                values += savings
                owner.append(i)
                cell.append(p * len(stages) + place[stage])
    saving = np.zeros((len(owner), formats))
    saving[rows, columns] = values
    order = np.argsort(np.array(cell), kind="stable")
    return np.array(owner, dtype=np.int64)[order], np.array(cell, dtype=np.int64)[order], saving[order]


class Costs:
    """What a step costs, and what its phases are worth.

    Under ``target`` a phase is worth its effective share. Under ``speedup`` and ``loss`` it is worth the part of the
    reference time that its slowest stage saves.

    Attributes:
        total: cost of everything. stage: [K] cost by stage.
        fixed: [K] what no choice changes. reference: time of the slowest stage when nothing is saved.
        unit: the reference, or 1 where it is 0.
    """

    def __init__(self, problem: PhasedProblem, stages: tuple[int, ...]) -> None:
        self.problem, self.budget = problem, problem.budget
        own: dict[int, list[float]] = {stage: [] for stage in stages}
        for item in sorted(problem.items, key=lambda item: item.id):
            own[item.stage].append(item.cost)
        self.stage = [math.fsum(own[stage]) for stage in stages]
        self.total = math.fsum(item.cost for item in problem.items)
        fixed = dict(self.budget.fixed_cost)
        self.fixed = [fixed.get(stage, 0.0) for stage in stages]
        self.elsewhere = max([cost for stage, cost in self.budget.fixed_cost if stage not in own], default=0.0)
        self.reference = max(*(f + c for f, c in zip(self.fixed, self.stage, strict=True)), self.elsewhere, 0.0)
        self.unit = self.reference or 1.0

    def time(self, worth: float) -> float:
        """What a step takes that is worth this much of the reference."""
        return self.reference - self.unit * worth

    def rows(self) -> Rows:
        """The rows of the budget's kind."""
        if self.budget.target is None:
            offset = [0.0, *((self.reference - f - c) / self.unit for f, c in zip(self.fixed, self.stage, strict=True))]
            active = tuple(range(1, len(offset)))
            cap = (self.reference - self.elsewhere) / self.unit
            return Rows(active, (self.unit,) * len(offset), tuple(offset), cap, ())
        divisor = [self.total, *self.stage]
        tolerance = self.budget.stage_tolerance
        used = range(1 if tolerance is None else len(divisor))
        active = tuple(j for j in used if divisor[j] > 0)
        return Rows(
            active,
            tuple(x if x > 0 else 1.0 for x in divisor),
            (0.0, *([tolerance or 0.0] * len(self.stage))),
            math.inf if active else 1.0,
            tuple(j for j in used if divisor[j] == 0),
        )

    def floor(self, target: float | None) -> float:
        """What a phase must be worth with a target of its own; -inf without one."""
        if target is None:
            return -math.inf
        if self.budget.target is not None:
            return target * (1 - SLACK)
        return (1 - (1 + SLACK) / target) * (self.reference / self.unit)

    def need(self) -> float:
        """The least Σ steps · worth of the remaining phases."""
        budget, spent = self.budget, self.problem.spent
        steps, done = self.problem.steps, 0 if spent is None else spent.steps
        achieved = 0.0 if spent is None else spent.achieved
        if budget.target is not None:
            return math.fsum([budget.target * steps * (1 - SLACK), -done * achieved])
        if budget.speedup is not None:
            return self._need_of_time(budget, steps, done / achieved if done else 0.0)
        return -math.inf

    def _need_of_time(self, budget: Budget, steps: int, spent: float) -> float:
        """Σ steps − what all steps may take, the spent ones' time given, in units of the reference."""
        assert budget.speedup is not None
        allowed = steps / budget.speedup * (1 + SLACK)
        remaining = sum(phase.steps for phase in self.problem.phases)
        return math.fsum([remaining, spent, -allowed]) * (self.reference / self.unit)
