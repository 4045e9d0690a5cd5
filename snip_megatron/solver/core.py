"""CP-SAT on the choices that the relaxation left open."""

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
"""How many picks that miss a need by rounding are forbidden one by one before needs are rounded finer."""


@dataclass(frozen=True)
class CoreResult:
    """Of one CP-SAT solve.

    Attributes:
        pick: [n], meets every need; None when nothing was found.
        bound: no picks among the open choices have a smaller Σ loss (as given).
        optimal: whether CP-SAT proved the picks optimal for its integers.
        deterministic: CP-SAT's deterministic seconds.
        resolution: how far rounding the losses to integers may have moved the optimum; 0 when all are exact.
    """

    pick: Ints | None
    bound: float
    optimal: bool
    deterministic: float
    resolution: float = 0.0


def solve_core(table: ChoiceTable, open_: NDArray[np.bool_], hint: Ints, limits: Limits) -> CoreResult:
    """Minimise Σ loss over the open choices [n, F], starting from ``hint`` (feasible, its columns open).

    Needs are rounded so that no feasible picks are lost: CP-SAT may return picks that miss a need by a hair. Those are
    forbidden, then the needs are rounded finer; at last they are rounded to the other side, and the bound stays that
    of the last rounding that lost nothing.
    """
    spent = 0.0
    for bits in (QUICK_BITS, BITS):
        model = _Model(table, open_, hint, bits=bits, strict=False)
        for _ in range(REPAIRS):
            result = model.solve(limits)
            spent += result.deterministic
            if result.pick is None or table.feasible(result.pick):
                return replace(result, deterministic=spent)
            model.forbid(result.pick)
    strict = _Model(table, open_, hint, bits=BITS, strict=True).solve(limits)
    pick = strict.pick if strict.pick is not None and table.feasible(strict.pick) else None
    return CoreResult(pick, result.bound, False, spent + strict.deterministic)


class _Model:
    """A Boolean for every open choice of an item with more than one; the other items are constants."""

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
        """The saving of everything and of every stage."""
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
        """No longer allow exactly these picks."""
        chosen = pick[self.rows] == self.columns
        self.model.add_bool_or([v.negated() for v, on in zip(self.variables, chosen, strict=True) if on])

    def solve(self, limits: Limits) -> CoreResult:
        """Picks are not checked against the needs here.

        The hint is feasible: an answer that rules it out is wrong, and is asked again without presolve.
        """
        spent = 0.0
        for presolve in (True, False):
            solver = cp_model.CpSolver()
            _configure(solver, limits, presolve=presolve)
            status = solver.solve(self.model)
            response = solver.response_proto
            spent += float(response.deterministic_time)
            if status != cp_model.INFEASIBLE and response.inner_objective_lower_bound <= self.hinted:
                break
        else:
            return CoreResult(None, -math.inf, False, spent)
        bound = math.fsum([*self.base, math.ldexp(response.inner_objective_lower_bound, self.exponent)])
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return CoreResult(None, bound, False, spent)
        on = np.array([solver.boolean_value(v) for v in self.variables], dtype=bool)
        pick = self.pick.copy()
        pick[self.rows[on]] = self.columns[on]
        return CoreResult(pick, bound, status == cp_model.OPTIMAL, spent, self.resolution)


def _configure(solver: cp_model.CpSolver, limits: Limits, *, presolve: bool) -> None:
    parameters = solver.parameters
    parameters.cp_model_presolve = presolve
    parameters.random_seed = limits.seed
    parameters.num_workers = limits.workers
    parameters.interleave_search = limits.workers > 1
    parameters.linearization_level = 2  # all of the model in the LP: seen 3–10 times faster than the default here
    # In OR-Tools 9.15 this presolve step (at-most-one and linear constraints that overlap: exactly our models) proves
    # wrong optima: google/or-tools#5293. tests/unit/solver/test_solve.py has an instance.
    parameters.presolve_inclusion_work_limit = 0
    if math.isfinite(limits.seconds):
        parameters.max_time_in_seconds = max(limits.seconds, 0.01)
    if math.isfinite(limits.deterministic):
        parameters.max_deterministic_time = max(limits.deterministic, 1e-3)
