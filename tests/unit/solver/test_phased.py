"""``solve_phased`` against the definitions, exhaustion, HiGHS and the static solver."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.solver import Budget, solve
from snip_megatron.solver.phased import (
    Phase,
    PhasedChoice,
    PhasedItem,
    PhasedProblem,
    PhasedSolution,
    Spent,
    solve_phased,
)
from snip_megatron.solver.phased.build import build_table

from .oracles import FORMATS, random_problem
from .phased_oracles import (
    effective,
    exhaust,
    feasible,
    highs,
    random_of_seed,
    random_phased,
    slowest,
    total_loss,
    total_time,
)

KINDS = ("target", "speedup", "loss")


def chosen(problem: PhasedProblem, solution: PhasedSolution) -> list[list[PhasedChoice]]:
    """The choices behind a solution's formats."""
    return [
        [next(c for c in item.choices if c.format is phase.choices[item.id]) for item in problem.items]
        for phase in solution.phases
    ]


def check(problem: PhasedProblem, solution: PhasedSolution) -> None:
    """What a solution says of itself, from the definitions."""
    choices = chosen(problem, solution)
    assert feasible(problem, choices)
    assert solution.loss == pytest.approx(total_loss(choices), rel=1e-14)
    assert solution.objective is not None
    assert solution.bound is not None
    assert solution.bound <= solution.objective
    if problem.budget.kind == "target":
        assert solution.effective == pytest.approx([effective(problem, phase) for phase in choices], rel=1e-12)
        assert solution.objective == solution.loss
    if problem.budget.kind == "loss":
        assert solution.objective == pytest.approx(total_time(problem, choices), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_equals_exhaustion(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, 1])
    phases, tolerance = int(rng.integers(1, 4)), rng.choice([0.1, 0.3, None])
    items, formats = {1: (5, 3), 2: (4, 2), 3: (3, 2)}[phases]
    problem = random_phased(rng, items, formats, 2, phases, kind=kind, tolerance=tolerance)
    if seed % 3 == 0:  # a group over both stages, and a pin
        made = [replace(item, group="g") if i < 2 else item for i, item in enumerate(problem.items)]
        made[-1] = replace(made[-1], pin=FORMATS[1])
        problem = replace(problem, items=tuple(made))
    best = exhaust(problem)
    solution = solve_phased(problem, deterministic_time=10)
    if best is None:
        assert solution.status == "infeasible"
        return
    assert solution.status == "optimal"
    check(problem, solution)
    assert solution.objective == pytest.approx(best, rel=1e-8 if kind == "loss" else 1e-13)


@pytest.mark.parametrize("seed", range(2, 20))
def test_equals_highs(seed: int) -> None:
    problem = random_of_seed(seed)
    best, solution = highs(problem), solve_phased(problem, deterministic_time=20)
    if best is None:
        assert solution.status == "infeasible"
        return
    check(problem, solution)
    assert solution.status == "optimal"
    loss, met = best
    assert met, "HiGHS' choices miss a need in float64: another seed"
    assert solution.objective == pytest.approx(loss, rel=1e-12)


def test_selections_that_picks_miss() -> None:
    """The rows that decide come first; the others are violated, too, and differ in one phase."""
    table = build_table(random_phased(np.random.default_rng(6), 20, 3, 3, 4))
    pick = table.loss.argmin(axis=1)
    assert not table.feasible(pick)
    values = dict(zip(table.rows.active, table.values(table.savings(pick)).T, strict=True))

    def met(selection: tuple[int, ...]) -> float:
        return sum(n * values[row][p] for p, (n, row) in enumerate(zip(table.steps, selection, strict=True)))

    first, *others = table.missed(pick, 8)
    assert met(first) == pytest.approx(table.average(table.worth(pick)))
    assert 0 < len(others) <= 7
    assert all(met(other) < table.need for other in others)
    assert all(sum(a != b for a, b in zip(first, other, strict=True)) == 1 for other in others)
    assert [met(other) for other in others] == sorted(met(other) for other in others)
    assert table.missed(table.most_saving(), 8)[1:] == []


@pytest.mark.parametrize("seed", range(8))
def test_one_phase_is_the_static_problem(seed: int) -> None:
    rng = np.random.default_rng([seed, 3])
    static = random_problem(rng, 40, 3, 3, rng.choice([0.02, 0.2, None]))
    items = tuple(
        PhasedItem(i.id, i.stage, i.cost, tuple(PhasedChoice(c.format, c.saving, (c.loss,)) for c in i.choices))
        for i in static.items
    )
    budgets = [static.budget, Budget(speedup=1.2, fixed_cost=((0, 2.0**42), (7, 2.0**41))), Budget(loss=5.0)]
    for budget in budgets:
        expected = solve(replace(static, budget=budget), deterministic_time=10)
        solution = solve_phased(PhasedProblem(budget, (Phase(1),), items), deterministic_time=10)
        assert solution.status == expected.status
        if expected.objective is not None:
            assert solution.objective == pytest.approx(expected.objective, rel=1e-13 if budget.loss is None else 2e-9)
            assert solution.phases[0].achieved == pytest.approx(expected.achieved, rel=1e-9)


def proportional(steps: tuple[int, ...] = (300, 200), factors: tuple[float, ...] = (0.4, 0.6)) -> PhasedProblem:
    """One stage, ten items of equal cost whose late errors cost more."""
    items = tuple(
        PhasedItem(
            f"i{i}",
            0,
            1.0,
            (
                PhasedChoice(Format.FP8, 0.0, (0.0,) * len(steps)),
                PhasedChoice(Format.FP4, 1.0, tuple((1.0 + i) * f for f in factors)),
            ),
        )
        for i in range(10)
    )
    return PhasedProblem(Budget(0.6), tuple(Phase(n) for n in steps), items)


def test_precision_is_spent_where_errors_cost_most() -> None:
    solution = solve_phased(proportional())
    assert [phase.achieved for phase in solution.phases] == [0.8, 0.3]
    assert solution.achieved == pytest.approx(0.6)


def test_what_is_spent_counts() -> None:
    problem = replace(proportional(), spent=Spent(500, 1.0))
    solution = solve_phased(problem)
    assert solution.loss == pytest.approx(3.0)  # a fifth of what remains: two items in both phases
    check(problem, solution)


def test_a_target_of_a_phase_is_a_floor() -> None:
    problem = proportional()
    floored = replace(problem, phases=(Phase(300), Phase(200, 0.7)))
    solution = solve_phased(floored)
    assert solution.phases[1].achieved == 0.7
    assert solution.loss > (solve_phased(problem).loss or 0.0)


def test_what_keeps_its_format() -> None:
    problem = proportional()
    kept = replace(problem, items=tuple(replace(item, keeps=(1,)) for item in problem.items))
    first, last = (phase.choices for phase in solve_phased(kept).phases)
    assert first == last


def test_an_unreachable_average_says_what_is_reachable() -> None:
    for spent, kind in ((Spent(1000, 0.1), "target"), (Spent(1000, 1.01), "speedup")):
        rng = np.random.default_rng(5)
        problem = replace(random_phased(rng, 20, 3, 2, 3, kind=kind), spent=spent)
        problem = replace(problem, phases=tuple(Phase(p.steps) for p in problem.phases))
        asked = replace(problem, budget=problem.budget.with_wanted(0.99 if kind == "target" else 1e3))
        fault = solve_phased(asked).fault
        assert fault is not None
        assert fault.reachable is not None
        reached = replace(problem, budget=problem.budget.with_wanted(fault.reachable))
        assert solve_phased(reached).status == "optimal"
        beyond = replace(problem, budget=problem.budget.with_wanted(fault.reachable * (1 + 1e-6)))
        assert solve_phased(beyond).status == "infeasible"


def test_an_unreachable_phase_is_named() -> None:
    problem = proportional()
    pinned = replace(
        problem, items=tuple(replace(item, pin=Format.FP8) for item in problem.items[:5]) + problem.items[5:]
    )
    solution = solve_phased(replace(pinned, budget=Budget(0.1), phases=(Phase(300), Phase(200, 0.6))))
    assert solution.status == "infeasible"
    assert "phase 1 reaches at most 0.5" in str(solution.fault)


def test_an_unreachable_loss_says_the_least() -> None:
    problem = replace(proportional(), budget=Budget(loss=-1.0))
    fault = solve_phased(problem).fault
    assert fault is not None
    assert fault.reachable == 0.0


def test_formats_that_save_on_one_stage_and_not_on_the_other() -> None:
    """What saves most in all may be infeasible where something else is not."""
    saves = {Format.FP8: (0.5, 0.5), Format.FP4: (1.0, 0.1)}
    items = tuple(
        PhasedItem(f"i{k}", k, 1.0, tuple(PhasedChoice(f, x[k], (0.0,)) for f, x in saves.items()), group="g")
        for k in range(2)
    )
    problem = PhasedProblem(Budget(0.5, 0.0), (Phase(1),), items)
    assert solve_phased(problem).phases[0].choices == {"i0": Format.FP8, "i1": Format.FP8}
    assert solve_phased(replace(problem, budget=Budget(0.55, 0.0))).status == "infeasible"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_and_limits_give_valid_bounds(kind: str) -> None:
    items = 12 if kind == "loss" else 30
    problem = random_phased(np.random.default_rng(11), items, 3, 3, 4, kind=kind, proportional=True)
    best = solve_phased(problem, deterministic_time=20)
    assert best.status == "optimal"
    assert best.objective is not None
    for one in (solve_phased(problem, solver="greedy"), solve_phased(problem, deterministic_time=1e-9)):
        check(problem, one)
        assert one.bound is not None
        assert one.bound <= best.objective * (1 + 1e-12)
        assert one.objective is not None
        assert best.objective <= one.objective * (1 + 1e-9)


def test_the_order_of_items_and_a_second_run_change_nothing() -> None:
    problem = random_phased(np.random.default_rng(4), 20, 3, 3, 3)
    first = solve_phased(problem, deterministic_time=5)
    assert first == replace(
        solve_phased(problem, deterministic_time=5),
        solve_seconds=first.solve_seconds,
        phases=first.phases,
    )
    turned = solve_phased(replace(problem, items=problem.items[::-1]), deterministic_time=5)
    assert [dict(p.choices) for p in turned.phases] == [dict(p.choices) for p in first.phases]


def test_a_hint_is_used_where_nothing_else_may_be_spent() -> None:
    problem = random_phased(np.random.default_rng(12), 60, 3, 3, 4, proportional=True)
    best = solve_phased(problem, deterministic_time=20)
    hint = [phase.choices for phase in best.phases]
    again = solve_phased(problem, deterministic_time=1e-9, hint=hint)
    assert again.objective == best.objective
    assert (solve_phased(problem, deterministic_time=1e-9).objective or 0.0) > (best.objective or 0.0)


def test_all_phases_alike() -> None:
    """Equal phases: the hardest structure, because every optimum has copies."""
    rng = np.random.default_rng(3)
    problem = random_phased(rng, 15, 3, 2, 1, tolerance=0.02)
    items = tuple(
        replace(i, keeps=(), choices=tuple(replace(c, losses=c.losses * 4) for c in i.choices)) for i in problem.items
    )
    equal = PhasedProblem(problem.budget, (Phase(100),) * 4, items)
    solution = solve_phased(equal, deterministic_time=20)
    assert solution.status == "optimal"
    check(equal, solution)
    once = solve_phased(replace(problem, phases=(Phase(1),), spent=None), deterministic_time=20)
    assert (solution.objective or 0.0) <= 4 * (once.objective or 0.0) * (1 + 1e-12)


def test_costs_of_nothing() -> None:
    item = PhasedItem(
        "i", 0, 0.0, (PhasedChoice(Format.FP8, 0.0, (1.0, 2.0)), PhasedChoice(Format.FP4, -1.0, (0.0, 0.0)))
    )
    problem = PhasedProblem(Budget(0.5, 0.02), (Phase(1), Phase(1)), (item,))
    solution = solve_phased(problem)
    assert solution.objective == 3.0  # what saves less than nothing is no choice on a stage that costs nothing
    timed = solve_phased(replace(problem, budget=Budget(speedup=1.0)))
    assert timed.objective == 3.0
    assert timed.achieved == 1.0


def test_bad_arguments() -> None:
    problem = proportional()
    with pytest.raises(SnipError, match="solver 'x' is not one of"):
        solve_phased(problem, solver="x")
    with pytest.raises(SnipError, match="hint: must have one entry for each of the 2 phases, has 1"):
        solve_phased(problem, hint=[{}])


def test_the_plan_counts_steps_from_zero_or_as_told() -> None:
    solution = solve_phased(proportional())
    plan = solution.to_plan()
    assert [(p.begin, n) for p, n in zip(plan.phases, plan.steps, strict=True)] == [(0, 300), (300, 200)]
    later = solution.to_plan(begins=[40, 340], version=7)
    assert (later.last, later.version, later.phases[1].precision_map.version) == (540, 7, 7)
    assert later.achieved == pytest.approx(0.6)
    assert later.objective == solution.objective == pytest.approx(sum(p.loss or 0.0 for p in solution.phases))


def test_times_are_those_of_the_slowest_stage() -> None:
    problem = random_phased(np.random.default_rng(8), 30, 3, 3, 3, kind="speedup")
    solution = solve_phased(problem, deterministic_time=10)
    check(problem, solution)
    reference = slowest(problem, None)
    for phase, choices in zip(solution.phases, chosen(problem, solution), strict=True):
        assert phase.speedup == pytest.approx(reference / slowest(problem, choices))
    assert solution.achieved is not None
    assert solution.achieved >= problem.budget.wanted * (1 - 1e-9)


def test_a_higher_loss_is_never_slower() -> None:
    problem = random_phased(np.random.default_rng(9), 10, 3, 2, 2, kind="loss")
    times = [
        solve_phased(replace(problem, budget=problem.budget.with_wanted(problem.budget.wanted * f))).objective or 0.0
        for f in (1.0, 1.3, 2.0)
    ]
    assert times[-1] > 0
    assert all(a >= b for a, b in pairwise(times))
