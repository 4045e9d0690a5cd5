"""Runs CP-SAT on a *core*: some of the choices that are still open."""

import math
import time
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from snip_megatron.solver.table import Bools, Floats, Ints, Table

BITS = 40
"""Losses and savings are integers of 2^-40 of their range. CP-SAT adds them within int64."""
_ROOM = 59  # bits of the largest sum
_LARGEST = 4.0  # in shares: a saving below -4 is as bad as one of -4, and cut so that sums fit


@dataclass
class Limits:
    """What a solve may spend. Equal limits give equal results, unless the deadline ends the search.

    The ``deadline`` is a value of ``time.perf_counter()``. CP-SAT's deterministic seconds have a limit, and those
    ``spent`` so far are counted. Both limits may be inf.
    """

    deadline: float
    deterministic: float
    seed: int
    spent: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock seconds that are left."""
        return self.deadline - time.perf_counter()

    @property
    def over(self) -> bool:
        return self.spent >= self.deterministic or self.seconds <= 0


def solve_core(
    table: Table, open_: Bools, hint: Ints, limits: Limits, *, effort: float, gap: float
) -> tuple[Ints | None, float]:
    """Minimise Σ loss over the open choices [D, F], starting from ``hint``, which is feasible and among them, in
    ``effort`` deterministic seconds or up to this ``gap``.

    Returns the best picks, or None if none were found; and a lower bound of Σ shifted loss over the open choices.
    Numbers are rounded so that no feasible picks are lost: the bound holds, and the picks may miss a need by rounding.
    """
    model = _Model(table, open_, hint)
    for presolve in (True, False):
        if limits.over:
            break
        solver = cp_model.CpSolver()
        _configure(solver, limits, effort, gap, presolve=presolve)
        status = solver.solve(model.model)
        limits.spent += float(solver.response_proto.deterministic_time)
        pick, bound = model.result(solver, status)
        # An answer that rules the hint out is wrong, and CP-SAT is run again without presolve.
        if status != cp_model.INFEASIBLE and bound <= table.shifted_loss(hint) + model.resolution:
            return pick, bound
    return None, -math.inf


class _Model:
    """The CP-SAT model: a Boolean for every open choice of decisions with several, and w of every phase.

    ``resolution`` is by how much rounding may move Σ loss.
    """

    def __init__(self, table: Table, open_: Bools, hint: Ints) -> None:
        self.table, self.model = table, cp_model.CpModel()
        free = open_.sum(axis=1) > 1
        self.pick = np.where(free, hint, open_.argmax(axis=1))
        self.fixed = np.nonzero(~free)[0]
        self.rows, self.columns = np.nonzero(open_ & free[:, None])
        self.variables = np.array([self.model.new_bool_var("") for _ in self.rows], dtype=object)
        for own in np.split(self.variables, np.nonzero(np.diff(self.rows))[0] + 1):
            if len(own):
                self.model.add_exactly_one(own.tolist())
        for variable, chosen in zip(self.variables, (hint[self.rows] == self.columns).tolist(), strict=True):
            self.model.add_hint(variable, chosen)
        self.worth = self._add_worth(hint)
        self._add_goal()

    def _add_worth(self, hint: Ints) -> list[cp_model.IntVar]:
        """Add w ≤ Σ saving / divisor + offset of every phase and active row, and the floors."""
        table = self.table
        steps = table.steps / math.gcd(*map(int, table.steps))
        bits = min(BITS, _ROOM - 2 - math.ceil(math.log2(max(len(self.rows) * 1.0, float(steps.sum()), 1.0))))
        self.steps, self.bits = [int(n) for n in steps], bits
        most = int(_LARGEST * 2**bits)
        cap = most if table.rows.cap == math.inf else _integers(np.array([table.rows.cap]), bits, up=True)[0]
        worth = []
        for p, floor in enumerate(table.floor.tolist()):
            low = -most if floor == -math.inf else _integers(np.array([floor]), bits, up=False)[0]
            worth.append(self.model.new_int_var(min(low, cap), cap, ""))
            for row in np.nonzero(table.rows.active)[0].tolist():
                own = table.within(p, row)
                mine, rest = np.nonzero(own[self.rows])[0], self.fixed[own[self.fixed]]
                done = math.fsum(table.saving[rest, self.pick[rest]] / table.rows.divisor[row])
                share = table.saving[self.rows[mine], self.columns[mine]] / table.rows.divisor[row]
                integers = _integers(np.maximum(share, -_LARGEST), bits, up=True)
                (known,) = _integers(np.maximum([done + table.rows.offset[row]], -_LARGEST), bits, up=True)
                terms = cp_model.LinearExpr.weighted_sum(self.variables[mine].tolist(), integers)
                self.model.add(terms + known >= worth[-1])
        hinted = table.worth(table.savings(hint)).clip(-_LARGEST, _LARGEST)
        for variable, value in zip(worth, _integers(hinted, bits, up=False), strict=True):
            self.model.add_hint(variable, min(value, cap))
        return worth

    def _add_goal(self) -> None:
        """Add the need and the objective."""
        table = self.table
        losses, known = table.loss[self.rows, self.columns], table.loss[self.fixed, self.pick[self.fixed]]
        whole = max(float(losses.max(initial=0.0)), float(known.max(initial=0.0))) or 1.0
        self.loss_unit = math.ldexp(1.0, math.frexp(whole)[1] - BITS)
        integers = _integers(losses / self.loss_unit, 0, up=False)
        self.known = math.fsum(known)
        loss = cp_model.LinearExpr.weighted_sum(self.variables.tolist(), integers)
        spent = cp_model.LinearExpr.weighted_sum(self.worth, self.steps)
        factor = float(table.steps[0]) / self.steps[0]
        if table.need > -math.inf:
            need = math.ldexp(table.need / factor, self.bits)
            self.model.add(spent >= math.floor(need))
        self.model.minimize(loss + int(self.known / self.loss_unit))
        self.resolution = len(losses) * self.loss_unit

    def result(self, solver: cp_model.CpSolver, status: cp_model.CpSolverStatus) -> tuple[Ints | None, float]:
        rest = self.known - int(self.known / self.loss_unit) * self.loss_unit
        bound = float(solver.best_objective_bound) * self.loss_unit + rest
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        on = np.array([solver.boolean_value(v) for v in self.variables], dtype=bool)
        pick = self.pick.copy()
        pick[self.rows[on]] = self.columns[on]
        return pick, bound


def _integers(values: Floats, bits: int, *, up: bool) -> list[int]:
    scaled = np.ldexp(values, bits)
    return [int(x) for x in (np.ceil(scaled) if up else np.floor(scaled))]


def _configure(solver: cp_model.CpSolver, limits: Limits, effort: float, gap: float, *, presolve: bool) -> None:
    parameters = solver.parameters
    parameters.cp_model_presolve = presolve
    parameters.random_seed = limits.seed
    parameters.relative_gap_limit = gap
    # Two workers cost more and change ties, and a single search keeps its deterministic limit.
    parameters.num_workers = 1
    parameters.linearization_level = 2  # the whole model in the LP: seen 3–10 times faster than the default here
    # In OR-Tools 9.15 this presolve step proves wrong optima if at-most-one and linear constraints overlap, as they do
    # in these models (google/or-tools#5293). test_equals_highs in tests/unit/solver/test_solve.py finds some.
    parameters.presolve_inclusion_work_limit = 0
    if math.isfinite(limits.seconds):
        parameters.max_time_in_seconds = max(limits.seconds, 0.01)
    if math.isfinite(most := min(effort, limits.deterministic - limits.spent)):
        parameters.max_deterministic_time = most
