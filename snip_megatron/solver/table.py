"""A problem as arrays: the one model that every budget, with and without phases, is solved by.

A *decision* is an item over a run of phases in which it keeps one format, or several items that save something jointly
(:attr:`Item.joint`) and keep their formats in the same phases: each of its choices is a format for every one of them.
A joint saving of items that change at different phases is shared half and half. A *row* is everything (row 0) or one
stage (row k + 1). In a phase, a row has the value Σ saving / divisor + offset. The saving w of the phase is the
smallest value of its rows:

- under ``fp4``, w is the effective share: the share of all cost, or of a stage's cost plus the tolerance;
- under ``speedup`` and ``loss``, w is the part of the reference time that the slowest stage saves.

Σ steps · w must reach ``need`` with the least Σ loss; under ``loss`` it becomes largest with Σ loss ≤ ``limit``.
Decisions are sorted by id and choices by the codes of formats, so that the order of a file does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision import Format
from snip_megatron.solver.problem import Choice, Item, Phase, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Formats = Mapping[str, Format]  # item id → format

GAP = 1e-4  # a solution is optimal if its certified gap is at most this: scores are estimates good to tens of percent
COUPLED_GAP = 1e-2
"""The search stops here for budgets of time over phases: all stages bind in every phase, and proofs take minutes."""
SLACK = 1e-9  # relative slack of a budget: Σ saving ≥ target·Σ cost·(1 − 1e-9) in float64


@dataclass(frozen=True)
class Rows:
    """The rows of a phase."""

    counted: Bools  # whether the row bounds w, [K + 1]
    # divisor, offset: as above, [K + 1]
    divisor: Floats
    offset: Floats
    hard: Bools  # whether the row costs nothing, so that its savings must not be negative, [K + 1]
    cap: float  # the largest w, whatever is saved; may be inf
    reference: float  # the time of the slowest stage when nothing is saved; 1 under ``fp4``


@dataclass(frozen=True)
class Table:
    """The arrays of D decisions, F choices at most, P phases, K stages."""

    columns: tuple[tuple[Formats, ...], ...]  # the choices of each decision: item id → format
    span: Ints  # the decision's first phase and the one after its last, [D, 2]
    stage: Ints  # [D], index into ``stages``, which ascend
    stages: tuple[int, ...]
    # loss, true_loss: [D, F], shifted so that a decision's smallest loss is 0, and as given; inf where a decision has
    # no such choice
    loss: Floats
    true_loss: Floats
    saving: Floats  # [D, F] of one step; 0 where a decision has no such choice
    cost: Floats  # [K + 1], Σ cost of each row
    # steps, floor: the steps of every phase, and its least w, -inf if it has none, [P] each
    steps: Floats
    rows: Rows
    floor: Floats
    need: float  # the least Σ steps · w
    limit: float  # the largest Σ true loss. If it is finite, Σ steps · w is what is maximised

    @classmethod
    def build(cls, problem: Problem) -> Table:
        phases = problem.phases or (Phase(1),)
        items = sorted(problem.items, key=lambda item: item.id)
        stages = tuple(sorted({item.stage for item in items}))
        cost = _costs(items, stages)
        rows = _rows(problem, cost, stages)
        groups, halves = _groups(items)
        spans: list[tuple[int, int]] = []
        stage: list[int] = []
        choices: list[tuple[list[Formats], list[Sequence[float]], list[float]]] = []
        for group in groups:
            begins = [p for p in range(len(phases)) if p not in group[0].keeps]
            spans += zip(begins, [*begins[1:], len(phases)], strict=True)
            stage += [stages.index(group[0].stage)] * len(begins)
            choices += [_choices(group, halves, rows, stages)] * len(begins)
        true_loss = np.full((len(choices), max(len(formats) for formats, _, _ in choices)), np.inf)
        saving = np.zeros_like(true_loss)
        for d, ((a, b), (formats, losses, savings)) in enumerate(zip(spans, choices, strict=True)):
            true_loss[d, : len(formats)] = [each[a] if b == a + 1 else math.fsum(each[a:b]) for each in losses]
            saving[d, : len(formats)] = savings
        return cls(
            columns=tuple(tuple(formats) for formats, _, _ in choices),
            span=np.array(spans, dtype=np.int64),
            stage=np.array(stage, dtype=np.int64),
            stages=stages,
            loss=true_loss - true_loss.min(axis=1, keepdims=True),
            true_loss=true_loss,
            saving=saving,
            cost=cost,
            steps=np.array([phase.steps for phase in phases], dtype=np.float64),
            rows=rows,
            floor=np.array([_floor(phase.target, problem, rows) for phase in phases]),
            need=_need(problem, rows),
            limit=problem.budget.value if problem.budget.kind == "loss" else math.inf,
        )

    @cached_property
    def allowed(self) -> Bools:
        """Whether a decision has each choice, [D, F]."""
        return np.isfinite(self.loss)

    @cached_property
    def active(self) -> Bools:
        """Whether each decision lies in each phase, [P, D]."""
        phase = np.arange(len(self.steps))[:, None]
        return (self.span[:, 0] <= phase) & (phase < self.span[:, 1])

    @cached_property
    def cells(self) -> list[list[Ints]]:
        """The decisions of each phase and row, by [P][K + 1]."""
        return [[np.nonzero(self.within(p, row))[0] for row in range(len(self.cost))] for p in range(len(self.steps))]

    def within(self, phase: int, row: int) -> Bools:
        """Return whether each decision counts in a row of a phase, [D]."""
        counts: Bools = self.active[phase] & ((self.stage == row - 1) | (row == 0))
        return counts

    @property
    def goal(self) -> float:
        """The gap at which the search stops."""
        return GAP if self.rows.counted[0] or len(self.steps) == 1 else COUPLED_GAP

    @cached_property
    def least(self) -> float:
        """Σ of each decision's least loss."""
        return math.fsum(self.true_loss.min(axis=1))

    # -- assignments: the column of each decision, [D] ---------------------------------------------------------
    def savings(self, assignment: Ints, *, exact: bool = True) -> Floats:
        """Return Σ saving of a step by phase and row, [P, K + 1]. If exact, all sums are correctly rounded."""
        saved = np.take_along_axis(self.saving, assignment[:, None], axis=1)[:, 0]
        if exact:
            return np.array([[math.fsum(saved[cell]) for cell in row] for row in self.cells])
        by_stage = [np.bincount(self.stage, saved * active, len(self.stages)) for active in self.active]
        return np.array([[saving.sum(), *saving] for saving in by_stage])

    def phase_saving(self, savings: Floats) -> Floats:
        """Return w of each phase, [P], from :meth:`savings`."""
        values = savings / self.rows.divisor + self.rows.offset
        phase_saving: Floats = np.where(self.rows.counted, values, np.inf).min(axis=1, initial=self.rows.cap)
        return phase_saving

    def over_steps(self, values: Floats) -> float:
        """Return Σ steps · value of the phases, [P]."""
        return math.fsum((self.steps * values).tolist())

    def total_saving(self, assignment: Ints) -> float:
        """Return Σ steps · w."""
        return self.over_steps(self.phase_saving(self.savings(assignment)))

    def total_loss(self, assignment: Ints) -> float:
        """Return Σ loss as given, correctly rounded."""
        return math.fsum(np.take_along_axis(self.true_loss, assignment[:, None], axis=1)[:, 0])

    def shifted_loss(self, assignment: Ints) -> float:
        """Return Σ loss above each decision's least, correctly rounded."""
        return math.fsum(np.take_along_axis(self.loss, assignment[:, None], axis=1)[:, 0])

    def is_feasible(self, assignment: Ints) -> bool:
        """Return whether an assignment meets every row, floor and the need."""
        savings = self.savings(assignment)
        if bool((savings[:, self.rows.hard] < 0).any()):
            return False
        phase_saving = self.phase_saving(savings)
        return bool((phase_saving >= self.floor).all()) and self.over_steps(phase_saving) >= self.need

    def fastest_assignment(self) -> Ints:
        """Return the assignment of the largest savings. Ties go to the lower loss. If even this saves too little, the
        budget is infeasible.
        """
        saved = np.where(self.allowed, self.saving, -np.inf)
        best = saved >= saved.max(axis=1, keepdims=True)
        return np.where(best, self.loss, np.inf).argmin(axis=1).astype(np.int64)


def _costs(items: Sequence[Item], stages: Sequence[int]) -> Floats:
    by_stage: dict[int, list[float]] = {stage: [] for stage in stages}
    for item in items:
        by_stage[item.stage].append(item.cost)
    return np.array([math.fsum(item.cost for item in items), *map(math.fsum, by_stage.values())])


def _rows(problem: Problem, cost: Floats, stages: Sequence[int]) -> Rows:
    if problem.budget.kind == "fp4":
        counts = np.array([True] + [problem.stage_tolerance is not None] * len(stages))
        offset = np.array([0.0] + [problem.stage_tolerance or 0.0] * len(stages))
        active = counts & (cost > 0)
        divisor = np.where(cost > 0, cost, 1.0)
        return Rows(active, divisor, offset, counts & (cost == 0), math.inf if active.any() else 1.0, 1.0)
    fixed = dict(problem.fixed_cost)
    times = cost + np.array([0.0, *(fixed.get(stage, 0.0) for stage in stages)])
    elsewhere = max([time for stage, time in problem.fixed_cost if stage not in stages], default=0.0)
    reference = max(float(times[1:].max()), elsewhere)
    unit = reference or 1.0
    active = np.arange(len(cost)) > 0
    offset = np.where(active, (reference - times) / unit, 0.0)
    hard = np.zeros(len(cost), dtype=bool)
    return Rows(active, np.full(len(cost), unit), offset, hard, (reference - elsewhere) / unit, reference)


Halves = Mapping[str, Sequence[Mapping[Format, float]]]  # item id → joint savings, of which it has a half


def _groups(items: Sequence[Item]) -> tuple[list[list[Item]], Halves]:
    """Return the items of each decision, sorted by id, in the order of their first items; and the shared savings."""
    by_id, groups = {item.id: item for item in items}, {item.id: [item] for item in items}
    halves: dict[str, list[Mapping[Format, float]]] = {}
    for item in items:
        for other, savings in item.joint.items():
            if by_id[other].keeps != item.keeps:
                for name in (item.id, other):
                    halves.setdefault(name, []).append(savings)
            elif groups[item.id] is not (joined := groups[other]):
                joined += groups[item.id]
                groups |= {member.id: joined for member in groups[item.id]}
    unique = {id(group): sorted(group, key=lambda item: item.id) for group in groups.values()}
    return sorted(unique.values(), key=lambda group: group[0].id), halves


def _choices(
    items: Sequence[Item], halves: Halves, rows: Rows, stages: Sequence[int]
) -> tuple[list[Formats], list[Sequence[float]], list[float]]:
    """Return every choice for all items of a decision: formats, losses by phase, and saving.

    That of several items has no choice that another one beats in loss and saving.
    """
    formats: list[Formats] = []
    losses: list[Sequence[float]] = []
    savings: list[float] = []
    for choices in itertools.product(*(_options(item, rows, stages) for item in items)):
        chosen = {item.id: choice.format for item, choice in zip(items, choices, strict=True)}
        joint = [half.get(chosen[item.id], 0.0) / 2 for item in items for half in halves.get(item.id, ())]
        for item in items:
            fmt = chosen[item.id]
            joint += [saved.get(fmt, 0.0) for other, saved in item.joint.items() if chosen.get(other) is fmt]
        formats.append(chosen)
        losses.append([math.fsum(each) for each in zip(*(choice.losses for choice in choices), strict=True)])
        savings.append(math.fsum([*joint, *(choice.saving for choice in choices)]))
    if len(items) == 1:
        return formats, losses, savings
    undominated = _undominated(np.array(losses), np.array(savings))
    return [formats[c] for c in undominated], [losses[c] for c in undominated], [savings[c] for c in undominated]


def _undominated(losses: Floats, savings: Floats) -> list[int]:
    """Return the choices that no other one dominates, from losses [C, P] and savings [C]. The first of equals stays."""
    as_good = (losses[:, None] <= losses).all(axis=2) & (savings[:, None] >= savings)
    equal = as_good & as_good.T
    beaten = (as_good & ~equal) | np.triu(equal, 1)
    return [int(c) for c in np.nonzero(~beaten.any(axis=0))[0]]


def _options(item: Item, rows: Rows, stages: Sequence[int]) -> list[Choice]:
    """Return the choices of an item by code. Rows that cost nothing have no negative savings."""
    choices = sorted((c for c in item.choices if item.pin in (None, c.format)), key=lambda c: c.format.code)
    if rows.hard[0] or rows.hard[1 + stages.index(item.stage)]:
        return [c for c in choices if c.saving >= 0] or choices
    return choices


def _floor(target: float | None, problem: Problem, rows: Rows) -> float:
    """Return the least w of a phase; -inf if it has no target of its own."""
    if target is None:
        return -math.inf
    if problem.budget.kind == "fp4":
        return target * (1 - SLACK)
    return 1 - (1 + SLACK) / target if rows.reference else 0.0


def _need(problem: Problem, rows: Rows) -> float:
    """Return the least Σ steps · w of the remaining phases: what is spent counts."""
    budget, steps, (past_steps, achieved) = problem.budget, problem.steps, problem.past
    if budget.kind == "fp4":
        return math.fsum([budget.value * steps * (1 - SLACK), -past_steps * achieved])
    if budget.kind == "speedup" and rows.reference:
        return math.fsum([steps - past_steps, past_steps / achieved, -steps / budget.value * (1 + SLACK)])
    return 0.0 if budget.kind == "speedup" else -math.inf
