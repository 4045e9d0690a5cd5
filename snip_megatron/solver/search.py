"""The search: relax, round, remove choices that no better assignment has, and solve growing cores by CP-SAT.

A *core* is some of the choices that are still open. Its bound, or that of the first choice outside of it, is a bound of
all assignments.
"""

import math
import time
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np
from ortools.sat.python import cp_model

from snip_megatron.solver.relaxation import Relaxation, relax, repair
from snip_megatron.solver.table import GAP, Bools, Floats, Ints, Table

BITS = 40  # losses and savings are integers of 2^-40 of their range. CP-SAT adds them within int64
_SUM_BITS = 59  # of the largest sum
_LARGEST_SHARE = 4.0  # a saving below -4 shares is as bad as one of -4, and cut so that sums fit
_CORES = (100, 400, 1600, math.inf)
_CORE_EFFORT = 0.25
"""Deterministic seconds of all cores but the last, and at first of those of a probe under a limit of the loss."""
_TIE_GAP = 3e-3  # gap of the loss of an assignment that is fast enough and within the limit
_RESCALED = 1e-3  # if rounding lowers Σ loss below this share of it, the relaxation is solved again in the new scale
_HALVINGS = 16


@dataclass
class Limits:
    """What a solve may use. Equal limits give equal results, unless the deadline ends the search."""

    deadline: float  # a value of ``time.perf_counter()``; may be inf
    deterministic: float  # CP-SAT's deterministic seconds; may be inf
    seed: int  # CP-SAT's seed
    used: float = 0.0  # deterministic seconds used so far

    @property
    def seconds(self) -> float:
        """Remaining wall-clock seconds."""
        return self.deadline - time.perf_counter()

    @property
    def exhausted(self) -> bool:
        return self.used >= self.deterministic or self.seconds <= 0


@dataclass(frozen=True)
class Outcome:
    """The best assignment, which meets the budget; a lower bound of its score; and its certified gap."""

    assignment: Ints
    bound: float
    gap: float


def search(table: Table, limits: Limits, *, exact: bool) -> Outcome | None:
    """Return the best assignment, by CP-SAT within ``limits`` if ``exact``. None if none meets the budget."""
    if table.limit < math.inf:
        return _fastest(table, limits, exact=exact)
    start = table.fastest_assignment()
    return _Search(table, start, limits, exact=exact).run() if table.is_feasible(start) else None


# -- budgets of the loss -----------------------------------------------------------------------------------------
def _fastest(table: Table, limits: Limits, *, exact: bool) -> Outcome | None:
    """Return an assignment of the largest Σ steps · w whose Σ loss is within the limit. Ties go to the lower loss.

    The relaxation bounds Σ steps · w, and rounding gives a first assignment. The least Σ loss is then searched at needs
    below the bound, one gap apart. A need whose least loss exceeds the limit lowers the bound, and the first one that
    fits proves the gap.
    """
    if table.least > table.limit:
        return None
    best, fastest, total = table.loss.argmin(axis=1), table.fastest_assignment(), float(table.steps.sum())
    bound = table.total_saving(fastest)
    if table.total_loss(fastest) <= table.limit:
        best = fastest
    elif (relaxation := relax(table, table.allowed, table.limit - table.least or 1.0)) is not None:
        bound = min(bound, -relaxation.bound)
        best = _rounded(table, relaxation, best)
    reached = table.total_saving(best)
    step, failures, effort, is_least = 0.9 * GAP * (total - bound), 0, _CORE_EFFORT, False
    highest = bound  # needs from here on were tried with this effort
    while True:
        closed = not exact or bound - reached <= table.goal * (total - reached)
        if (closed and is_least) or (exact and limits.exhausted):
            break
        need = reached if closed else max(highest - step, (reached + highest) / 2)
        at_need = replace(table, need=need, limit=math.inf)
        start = best if closed else fastest
        probe = _Search(at_need, start, limits, exact=exact, effort=effort, limit=table.limit - table.least)
        outcome = probe.run()
        if table.total_loss(outcome.assignment) <= table.limit:
            best, reached, is_least = outcome.assignment, table.total_saving(outcome.assignment), True
            continue
        if outcome.bound > table.limit - table.least:
            bound = need
        highest, failures = need, failures + 1
        step = 0.95 * GAP * (total - bound) * 2 ** max(0, failures - 3)
        if highest - reached <= 0.5 * GAP * (total - reached):
            highest, failures, effort = bound, 0, 2 * effort
    return Outcome(best, -bound, (bound - reached) / (total - reached) if bound > reached else 0.0)


def _rounded(table: Table, relaxation: Relaxation, start: Ints) -> Ints:
    """Return the fastest assignment within the limit of the loss. Halving finds the highest need at which a repair of
    the relaxation's solution stays within it.
    """
    best, nearest = start, relaxation.reduced.argmin(axis=1)
    low, high = table.total_saving(best), -relaxation.bound
    for _ in range(_HALVINGS):
        need = (low + high) / 2
        rounded = repair(replace(table, need=need, limit=math.inf), nearest, relaxation.phase_saving, best)
        if table.total_loss(rounded) <= table.limit and table.total_saving(rounded) > low:
            best, low = rounded, table.total_saving(rounded)
        else:
            high = need
    return best


# -- the least loss ----------------------------------------------------------------------------------------------
@dataclass
class _Search:
    """Minimises Σ shifted loss, the ``score``, from a feasible assignment; keeps the best and a bound of all."""

    table: Table
    assignment: Ints
    limits: Limits
    _: KW_ONLY
    exact: bool
    effort: float = math.inf  # deterministic seconds of the last core
    limit: float = math.inf  # the search also ends when the bound exceeds it, or near the least loss within it
    bound: float = field(default=0.0, init=False)
    relaxation: Relaxation | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.score = self.table.shifted_loss(self.assignment)

    def run(self) -> Outcome:
        self._relax()
        if self.exact and self.relaxation is not None:
            for size in _CORES:
                if self._is_done() or self.limits.exhausted or self._solve_core(self.relaxation, size):
                    break
        return Outcome(self.assignment, min(self.bound, self.score), self._gap())

    def _gap(self) -> float:
        return (self.score - self.bound) / self.score if self.score > self.bound else 0.0

    def _is_done(self) -> bool:
        within = self.score <= self.limit < math.inf
        return self._gap() <= (_TIE_GAP if within else self.table.goal) or self.bound > self.limit

    def _offer(self, assignment: Ints) -> bool:
        """Take an assignment if it is better. Returns whether it is feasible."""
        feasible = self.table.is_feasible(assignment)
        score = self.table.shifted_loss(assignment)
        if feasible and score < self.score:
            self.assignment, self.score = assignment, score
        return feasible

    def _relax(self) -> None:
        """Solve the relaxation and round it. Losses too large for any better assignment are excluded."""
        while not self._is_done():
            before = self.score
            relaxation = relax(self.table, self.table.loss <= before, before)
            if relaxation is None:
                return
            self.relaxation, self.bound = relaxation, max(self.bound, relaxation.bound)
            nearest = relaxation.reduced.argmin(axis=1)
            self._offer(repair(self.table, nearest, relaxation.phase_saving, self.assignment))
            if not self.score <= _RESCALED * before:
                return

    def _solve_core(self, relaxation: Relaxation, size: float) -> bool:
        """Solve the ``size`` open choices of least reduced cost. Returns whether these are all that are open."""
        end = self.score * (1 - 0.9 * self.table.goal)  # choices from here on gain less than the gap
        core, is_whole, beyond = _core_of(relaxation, self.assignment, end, size)
        effort = self.effort if is_whole else _CORE_EFFORT
        assignment, bound = _solve(self.table, core, self.assignment, self.limits, effort)
        self.bound = max(self.bound, min(bound, beyond))
        if assignment is not None and not self._offer(assignment):  # it misses a need by rounding
            phase_saving = self.table.phase_saving(self.table.savings(assignment))
            self._offer(repair(self.table, assignment, phase_saving, self.assignment))
        return is_whole


def _core_of(relaxation: Relaxation, assignment: Ints, end: float, size: float) -> tuple[Bools, bool, float]:
    """Return a core [D, F]: the ``size`` open choices of least reduced cost, and those of the assignment.

    Choices are open if an assignment with them may have a score below ``end``. Also returns whether the core has all
    of them, and a lower bound of the score of every assignment outside of it.
    """
    lowest = relaxation.bound + relaxation.reduced
    best = relaxation.reduced == 0.0  # one or more of each decision, which a core always has
    core = (lowest < end) | best
    is_whole = bool(core.sum() - best.sum() <= size)
    if not is_whole:
        core = (lowest < np.sort(lowest[core & ~best])[int(size)]) | best
    beyond = float(lowest[~core].min(initial=math.inf))
    core[np.arange(len(core)), assignment] = True
    return core, is_whole, beyond


# -- CP-SAT ------------------------------------------------------------------------------------------------------
def _solve(table: Table, core: Bools, hint: Ints, limits: Limits, effort: float) -> tuple[Ints | None, float]:
    """Minimise the score over the choices of ``core`` [D, F], starting from ``hint``, which is feasible and among them,
    in ``effort`` deterministic seconds, or up to half of the table's gap of losses.

    Returns the best assignment, or None if none was found; and a lower bound of the score over the core. Numbers are
    rounded so that no feasible assignment is lost: the bound holds, and the assignment may miss the need or the limit
    by rounding.
    """
    model = _CoreModel(table, core, hint)
    if limits.exhausted:
        return None, -math.inf
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.random_seed = limits.seed
    parameters.relative_gap_limit = table.goal / 2
    # Two workers cost more and change ties, and a single search keeps its deterministic limit.
    parameters.num_workers = 1
    parameters.linearization_level = 2  # the whole model in the LP: seen 3–10 times faster than the default here
    # In OR-Tools 9.15 this presolve step proves wrong optima if at-most-one and linear constraints overlap, as they
    # do in these models (google/or-tools#5293). test_equals_highs in tests/unit/solver/test_solve.py finds some.
    parameters.presolve_inclusion_work_limit = 0
    if math.isfinite(limits.seconds):
        parameters.max_time_in_seconds = max(limits.seconds, 0.01)
    if math.isfinite(most := min(effort, limits.deterministic - limits.used)):
        parameters.max_deterministic_time = most
    status = solver.solve(model.model)
    limits.used += float(solver.response_proto.deterministic_time)
    assignment, bound = model.result(solver, status)
    # An answer that rules the hint out is wrong.
    if status == cp_model.INFEASIBLE or bound > table.shifted_loss(hint) + model.resolution:
        return None, -math.inf
    return assignment, bound


class _CoreModel:
    """The CP-SAT model: a Boolean for every choice of decisions that have several in the core, and w of every phase.

    ``resolution`` is by how much rounding may move the score.
    """

    def __init__(self, table: Table, core: Bools, hint: Ints) -> None:
        self.table, self.model = table, cp_model.CpModel()
        free = core.sum(axis=1) > 1
        self.assignment = np.where(free, hint, core.argmax(axis=1))
        self.fixed = np.nonzero(~free)[0]
        self.decisions, self.choices = np.nonzero(core & free[:, None])
        self.variables = np.array([self.model.new_bool_var("") for _ in self.decisions], dtype=object)
        for choices in np.split(self.variables, np.nonzero(np.diff(self.decisions))[0] + 1):
            if len(choices):
                self.model.add_exactly_one(choices.tolist())
        for variable, hinted in zip(self.variables, (hint[self.decisions] == self.choices).tolist(), strict=True):
            self.model.add_hint(variable, hinted)
        self._add_phases(hint)
        self._add_objective()

    def _add_phases(self, hint: Ints) -> None:
        """Add w ≤ Σ saving / divisor + offset of every phase and counted row, the floors, and the need."""
        table = self.table
        steps = table.steps / math.gcd(*map(int, table.steps))
        bits = min(BITS, _SUM_BITS - 2 - math.ceil(math.log2(max(len(self.decisions) * 1.0, float(steps.sum()), 1.0))))
        largest = int(_LARGEST_SHARE * 2**bits)
        cap = largest if table.rows.cap == math.inf else _integer(table.rows.cap, bits, up=True)
        phase_saving = []
        for p, floor in enumerate(table.floor.tolist()):
            low = -largest if floor == -math.inf else _integer(floor, bits, up=False)
            phase_saving.append(self.model.new_int_var(min(low, cap), cap, ""))
            for row in np.nonzero(table.rows.counted)[0].tolist():
                within = table.within(p, row)
                free, fixed = np.nonzero(within[self.decisions])[0], self.fixed[within[self.fixed]]
                constant = math.fsum(table.saving[fixed, self.assignment[fixed]] / table.rows.divisor[row])
                constant = max(constant + table.rows.offset[row], -_LARGEST_SHARE)
                share = table.saving[self.decisions[free], self.choices[free]] / table.rows.divisor[row]
                integers = _integers(np.maximum(share, -_LARGEST_SHARE), bits, up=True)
                terms = cp_model.LinearExpr.weighted_sum(self.variables[free].tolist(), integers)
                self.model.add(terms + _integer(constant, bits, up=True) >= phase_saving[-1])
        hinted = table.phase_saving(table.savings(hint)).clip(-_LARGEST_SHARE, _LARGEST_SHARE)
        for variable, value in zip(phase_saving, _integers(hinted, bits, up=False), strict=True):
            self.model.add_hint(variable, min(value, cap))
        total = cp_model.LinearExpr.weighted_sum(phase_saving, [int(n) for n in steps])
        unit = math.ldexp(float(table.steps[0]) / int(steps[0]), -bits)
        self.model.add(total >= math.floor(table.need / unit))

    def _add_objective(self) -> None:
        """Minimise Σ loss."""
        table = self.table
        losses, fixed = table.loss[self.decisions, self.choices], table.loss[self.fixed, self.assignment[self.fixed]]
        largest = max(float(losses.max(initial=0.0)), float(fixed.max(initial=0.0))) or 1.0
        self.loss_unit = math.ldexp(1.0, math.frexp(largest)[1] - BITS)
        self.fixed_loss = math.fsum(fixed)
        loss = cp_model.LinearExpr.weighted_sum(
            self.variables.tolist(), _integers(losses / self.loss_unit, 0, up=False)
        )
        self.model.minimize(loss + int(self.fixed_loss / self.loss_unit))
        self.resolution = len(losses) * self.loss_unit

    def result(self, solver: cp_model.CpSolver, status: cp_model.CpSolverStatus) -> tuple[Ints | None, float]:
        units = float(solver.best_objective_bound) - int(self.fixed_loss / self.loss_unit)
        bound = units * self.loss_unit + self.fixed_loss
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        chosen = np.array([solver.boolean_value(v) for v in self.variables], dtype=bool)
        assignment = self.assignment.copy()
        assignment[self.decisions[chosen]] = self.choices[chosen]
        return assignment, bound


def _integers(values: Floats, bits: int, *, up: bool) -> list[int]:
    return [_integer(value, bits, up=up) for value in values.tolist()]


def _integer(value: float, bits: int, *, up: bool) -> int:
    """Return value · 2^bits, rounded."""
    scaled = math.ldexp(value, bits)
    return math.ceil(scaled) if up else math.floor(scaled)
