"""``solve_phased``: a phased problem in, a solution a phase out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from snip_megatron.errors import SnipError, quoted
from snip_megatron.precision import Format
from snip_megatron.solver.api import SOLVERS, make_limits
from snip_megatron.solver.collector import collector_paused
from snip_megatron.solver.limits import Limits, Outcome
from snip_megatron.solver.phased.build import Costs, build_table
from snip_megatron.solver.phased.infeasible import why_infeasible
from snip_megatron.solver.phased.problem import PhasedProblem
from snip_megatron.solver.phased.solution import PhasedSolution
from snip_megatron.solver.phased.table import PhasedTable
from snip_megatron.solver.solution import Solution, saved_share, speedup_of
from snip_megatron.solver.table import Floats, Ints


def solve_phased(
    problem: PhasedProblem,
    *,
    time_limit_s: float | None = None,
    deterministic_time: float | None = None,
    seed: int = 0,
    hint: Sequence[Mapping[str, Format]] | None = None,
    solver: str = "cpsat",
) -> PhasedSolution:
    """Choose one format an item and phase, as the budget over all phases asks.

    Args:
        time_limit_s, deterministic_time, seed, solver: as of ``solve``.
        hint: formats by item id, a mapping a phase, such as what remains of the last plan; unknown ids and formats are
            ignored.

    Returns a PhasedSolution, of status ``infeasible`` where nothing meets the budget. Raises SnipError on a bad
    argument.
    """
    started = time.perf_counter()
    limits = make_limits(time_limit_s, deterministic_time, seed)
    if solver not in SOLVERS:
        raise SnipError(f"solver {quoted(solver)} is not one of {', '.join(SOLVERS)}")
    if hint is not None and len(hint) != len(problem.phases):
        raise SnipError(f"hint: must have one entry for each of the {len(problem.phases)} phases, has {len(hint)}")
    with collector_paused():
        table = build_table(problem)
    outcome = _search(table, problem, hint, solver, limits)
    steps = tuple(phase.steps for phase in problem.phases)
    budget = problem.budget
    if outcome is None:
        return PhasedSolution(
            phases=(),
            steps=steps,
            status="infeasible",
            target=budget.wanted,
            kind=budget.kind,
            solve_seconds=time.perf_counter() - started,
            deterministic_seconds=limits.spent,
            fault=why_infeasible(table, problem),
        )
    return _solution(table, problem, outcome, limits.spent, time.perf_counter() - started)


def _search(
    table: PhasedTable,
    problem: PhasedProblem,
    hint: Sequence[Mapping[str, Format]] | None,
    solver: str,
    limits: Limits,
) -> Outcome | None:
    from snip_megatron.solver.phased import exact  # OR-Tools: loaded where it is used, not in training ranks

    if problem.budget.loss is not None:
        return exact.solve_least_time(table, problem.budget.loss, limits, exact=solver == "cpsat")
    start = exact.find_feasible(table, limits)
    if start is None:
        return None
    hinted = _hinted(table, hint)
    if hinted is not None and table.feasible(hinted) and table.difference(hinted, start) < 0:
        start = hinted
    if solver == "greedy":
        return exact.solve_phased_greedy(table, start)
    return exact.solve_phased_exact(table, start, limits)


def _hinted(table: PhasedTable, hint: Sequence[Mapping[str, Format]] | None) -> Ints | None:
    """The hint as picks; a decision without a usable hint takes what saves most."""
    if hint is None:
        return None
    pick = table.most_saving()
    column = {f: j for j, f in enumerate(table.formats)}
    for d, decision in enumerate(table.decisions):
        known = hint[decision.phases[0]]
        j = column.get(known[decision.ids[0]]) if decision.ids[0] in known else None
        if j is not None and np.isfinite(table.loss[d, j]):
            pick[d] = j
    return pick


def _solution(
    table: PhasedTable, problem: PhasedProblem, outcome: Outcome, spent: float, seconds: float
) -> PhasedSolution:
    """The outcome in the problem's own terms; every figure but the bound is computed from its choices."""
    budget, pick = problem.budget, outcome.pick
    chosen: list[dict[str, Format]] = [{} for _ in problem.phases]
    for decision, j in zip(table.decisions, pick.tolist(), strict=True):
        for p in range(*decision.phases):
            chosen[p] |= dict.fromkeys(decision.ids, table.formats[j])
    losses = [
        [next(c.losses[p] for c in item.choices if c.format is formats[item.id]) for item in problem.items]
        for p, formats in enumerate(chosen)
    ]
    costs, worth, savings = Costs(problem, table.stages), table.worth(pick), table.savings(pick)
    loss = math.fsum(x for each in losses for x in each)
    objective, bound = loss, outcome.bound
    if budget.kind == "loss":
        objective = _time(costs, table, worth)
        bound = costs.reference * sum(table.steps) + costs.unit * outcome.bound
    status = "optimal" if outcome.optimal else "feasible"
    phases = tuple(
        Solution(
            choices={item.id: formats[item.id] for item in problem.items},
            status=status,
            target=budget.wanted,
            kind=budget.kind,
            objective=math.fsum(losses[p]),
            achieved=saved_share(float(savings[p, 0]), costs.total),
            achieved_per_stage={
                stage: saved_share(float(saved), cost)
                for stage, saved, cost in zip(table.stages, savings[p, 1:], costs.stage, strict=True)
            },
            loss=math.fsum(losses[p]),
            speedup=None if budget.kind == "target" else speedup_of(costs.reference, costs.time(float(worth[p]))),
            solve_seconds=seconds,
        )
        for p, formats in enumerate(chosen)
    )
    return PhasedSolution(
        phases=phases,
        steps=tuple(table.steps),
        status=status,
        target=budget.wanted,
        kind=budget.kind,
        objective=objective,
        bound=min(objective, bound),
        achieved=_achieved(table, problem, costs, savings, worth),
        effective=tuple(worth.tolist()),
        loss=loss,
        solve_seconds=seconds,
        deterministic_seconds=spent,
    )


def _achieved(table: PhasedTable, problem: PhasedProblem, costs: Costs, savings: Floats, worth: Floats) -> float:
    """The average over the run."""
    spent = problem.spent
    done, achieved = (0, 1.0) if spent is None or not spent.steps else (spent.steps, spent.achieved)
    if problem.budget.kind == "target":
        shares = [n * saved_share(float(s), costs.total) for n, s in zip(table.steps, savings[:, 0], strict=True)]
        return math.fsum([*shares, done * achieved]) / problem.steps
    taken = math.fsum([_time(costs, table, worth), done * costs.reference / achieved])
    return speedup_of(costs.reference * problem.steps, taken)


def _time(costs: Costs, table: PhasedTable, worth: Floats) -> float:
    return math.fsum(n * costs.time(w) for n, w in zip(table.steps, worth.tolist(), strict=True))
