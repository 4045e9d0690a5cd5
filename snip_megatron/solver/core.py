"""Runs CP-SAT on a *core*: the choices that the relaxation leaves open."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from snip_megatron.solver.integers import BITS, QUICK_BITS, integer_losses, integer_need
from snip_megatron.solver.limits import Limits
from snip_megatron.solver.table import ChoiceTable, Ints

REPAIRS = 4
"""Number of infeasible picks that are forbidden one by one before the needs are rounded more finely."""


@dataclass(frozen=True)
class CoreResult:
    """The result of one core.

    Attributes:
        pick: [n], columns that meet every need; None if none were found.
        bound: lower bound of Σ loss (as given) over all picks among the open choices.
        optimal: whether CP-SAT proved that the picks are optimal for its integers.
        resolution: by how much rounding the losses to integers may have moved the optimum; 0 if all of them are exact.
    """

    pick: Ints | None
    bound: float
    optimal: bool
    resolution: float = 0.0


def solve_core(
    table: ChoiceTable, open_: NDArray[np.bool_], hint: Ints, limits: Limits, *, by_lp: bool = False
) -> CoreResult:
    """Minimise Σ loss over the open choices [n, F], starting from ``hint``.

    Needs are rounded so that no feasible picks are lost. CP-SAT may therefore return picks that slightly miss a need.
    Such picks are forbidden and CP-SAT runs again; after some attempts the needs are rounded more finely. Finally the
    needs are rounded to the other side, so that all picks are feasible. The bound is always taken from roundings that
    lose no feasible picks.

    Args:
        table: the problem.
        open_: bool [n, F], the open choices.
        hint: feasible picks [n] among the open choices.
        limits: shared by all of these runs of CP-SAT.
        by_lp: branch on the LP relaxation instead of on conflicts.
    """
    bound = -math.inf
    for bits in (QUICK_BITS, BITS):
        model = _Model(table, open_, hint, bits=bits, strict=False)
        for _ in range(REPAIRS):
            result = model.solve(limits, by_lp=by_lp)
            bound = max(bound, result.bound)
            if result.pick is None or table.feasible(result.pick):
                return replace(result, bound=bound)
            model.forbid(result.pick)
    strict = _Model(table, open_, hint, bits=BITS, strict=True).solve(limits, by_lp=by_lp)
    pick = strict.pick if strict.pick is not None and table.feasible(strict.pick) else None
    return CoreResult(pick, bound, False)


class _Model:
    """The CP-SAT model: one Boolean for every open choice of items with several. The other items are constants."""

    def __init__(self, table: ChoiceTable, open_: NDArray[np.bool_], hint: Ints, *, bits: int, strict: bool) -> None:
        count = open_.sum(axis=1)
        free = count > 1
        self.table, self.model = table, cp_model.CpModel()
        self.fixed = np.nonzero(~free)[0]
        self.pick = np.where(free, hint, open_.argmax(axis=1))
        self.rows, self.columns = np.nonzero(open_ & free[:, None])
        self.variables = [self.model.new_bool_var("") for _ in self.rows]
        for start, stop in pairwise(np.searchsorted(self.rows, [*np.nonzero(free)[0], len(hint)])):
            self.model.add_exactly_one(self.variables[start:stop])
        hinted = hint[self.rows] == self.columns
        for variable, chosen in zip(self.variables, hinted.tolist(), strict=True):
            self.model.add_hint(variable, chosen)
        self._add_needs(bits, strict)
        least = np.where(open_, table.loss, np.inf).min(axis=1)
        self.base = np.where(open_, table.true_loss, np.inf).min(axis=1)
        losses = table.loss[self.rows, self.columns] - least[self.rows]
        integers, self.exponent = integer_losses(losses.tolist())
        exact = all(math.ldexp(m, self.exponent) == x for m, x in zip(integers, losses.tolist(), strict=True))
        self.resolution = 0.0 if exact else math.ldexp(int(free.sum()), self.exponent)
        self.hinted = sum(integers[i] for i in np.nonzero(hinted)[0])
        self.model.minimize(cp_model.LinearExpr.weighted_sum(self.variables, integers))

    def _add_needs(self, bits: int, strict: bool) -> None:
        """Add the constraints on the saving of the whole model and of every stage."""
        table = self.table
        saving = table.saving[self.rows, self.columns]
        decided = table.pick_saving(self.pick)[self.fixed]
        row_stage, fixed_stage = table.stage[self.rows], table.stage[self.fixed]
        for k, need in enumerate([table.need, *table.stage_need.tolist()], start=-1):
            if not math.isfinite(need):
                continue
            mine = np.nonzero((row_stage == k) | (k < 0))[0]
            done = decided[(fixed_stage == k) | (k < 0)]
            integers = integer_need(saving[mine].tolist(), need, done.tolist(), bits=bits, strict=strict)
            terms = cp_model.LinearExpr.weighted_sum([self.variables[i] for i in mine], integers.coefficients)
            self.model.add(terms >= integers.need)

    def forbid(self, pick: Ints) -> None:
        """Forbid exactly these picks."""
        chosen = pick[self.rows] == self.columns
        self.model.add_bool_or([v.negated() for v, on in zip(self.variables, chosen, strict=True) if on])

    def solve(self, limits: Limits, *, by_lp: bool) -> CoreResult:
        """Run CP-SAT. The picks of the result are not checked against the needs."""
        answered = answer(self.model, self.hinted, limits, by_lp=by_lp)
        if answered is None:
            return CoreResult(None, -math.inf, False)
        solver, status = answered
        bound = math.fsum([*self.base, math.ldexp(solver.response_proto.inner_objective_lower_bound, self.exponent)])
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return CoreResult(None, bound, False)
        on = np.array([solver.boolean_value(v) for v in self.variables], dtype=bool)
        pick = self.pick.copy()
        pick[self.rows[on]] = self.columns[on]
        return CoreResult(pick, bound, status == cp_model.OPTIMAL, self.resolution)


def answer(
    model: cp_model.CpModel, hinted: float, limits: Limits, *, by_lp: bool, cuts: bool = True
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus] | None:
    """Run CP-SAT, and check its answer against a known feasible solution.

    Args:
        model: the model.
        hinted: objective of the hint, which is feasible; inf without a hint. An answer that rules the hint out is
            wrong, and CP-SAT is run again without presolve.
        limits: what CP-SAT may still spend.
        by_lp: branch on the LP relaxation instead of on conflicts.
        cuts: whether to add cutting planes to the LP relaxation.

    Returns:
        The solver and its status. None if the limits are spent, or if both answers contradict the hint.
    """
    for presolve in (True, False):
        if limits.over:
            return None
        solver = cp_model.CpSolver()
        _configure(solver, limits, presolve=presolve, by_lp=by_lp, cuts=cuts)
        status = solver.solve(model)
        limits.spend(float(solver.response_proto.deterministic_time))
        if hinted == math.inf:
            return solver, status
        if status != cp_model.INFEASIBLE and solver.response_proto.inner_objective_lower_bound <= hinted:
            return solver, status
    return None


def _configure(solver: cp_model.CpSolver, limits: Limits, *, presolve: bool, by_lp: bool, cuts: bool) -> None:
    parameters = solver.parameters
    parameters.cp_model_presolve = presolve
    parameters.random_seed = limits.seed
    # A single search keeps its deterministic limit. Several interleaved searches check it only after each batch, in
    # which each may take a second; they were seen to take 12.8 s with a limit of 4.2 s.
    parameters.num_workers = 1
    if by_lp:
        parameters.search_branching = cp_model.LP_SEARCH
    parameters.linearization_level = 2  # the whole model in the LP: seen 3–10 times faster than the default here
    if not cuts:
        parameters.cut_level = 0
    # In OR-Tools 9.15 this presolve step proves wrong optima if at-most-one and linear constraints overlap, as they do
    # in these models (google/or-tools#5293). tests/unit/solver/test_solve.py has an instance.
    parameters.presolve_inclusion_work_limit = 0
    if math.isfinite(limits.seconds):
        parameters.max_time_in_seconds = max(limits.seconds, 0.01)
    if math.isfinite(limits.deterministic):
        parameters.max_deterministic_time = limits.left
