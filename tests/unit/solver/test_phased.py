"""``solve`` over phases against the definitions, exhaustion, HiGHS and one map."""

from dataclasses import replace

import numpy as np
import pytest

from snip_megatron.precision import Format
from snip_megatron.precision.budget import Budget
from snip_megatron.solver import Choice, Item, Phase, Problem, Solution, Spent, solve

from .oracles import (
    FORMATS,
    GAP,
    chosen,
    exhaust,
    feasible,
    fp4,
    highs,
    least,
    random_of_seed,
    random_phased,
    random_problem,
    total_loss,
    value_of,
    with_joint,
)

KINDS = ("fp4", "speedup", "loss")


def check(problem: Problem, solution: Solution, best: float | None = None) -> None:
    """What a solution says of itself, from the definitions. Budgets of time may stop at a gap of 1e-2."""
    choices = chosen(problem, solution)
    assert feasible(problem, choices)
    assert solution.loss == pytest.approx(total_loss(choices), rel=1e-12)
    value = value_of(problem, choices)
    assert solution.objective == pytest.approx(value, rel=1e-12)
    assert solution.bound <= solution.objective
    if best is not None:
        whole = value if problem.budget.kind == "loss" else value - least(problem)
        assert solution.bound <= best + 1e-9 * abs(best)
        assert value - best <= max(solution.gap, 1e-9) * whole + 1e-9 * abs(best)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_equals_exhaustion(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, 1])
    phases, tolerance = int(rng.integers(1, 4)), rng.choice([0.1, 0.3, None])
    items, formats = {1: (5, 3), 2: (4, 2), 3: (3, 2)}[phases]
    problem = random_phased(rng, items, formats, 2, phases, kind=kind, tolerance=tolerance)
    if seed % 3 == 0:
        problem = replace(problem, items=(*problem.items[:-1], replace(problem.items[-1], pin=FORMATS[1])))
    best = exhaust(problem)
    solution = solve(problem, deterministic_time=10)
    if best is None:
        assert solution.status == "infeasible"
        return
    assert solution.gap <= (GAP if kind == "fp4" else 1e-2)
    check(problem, solution, best)


@pytest.mark.parametrize("kind", ["speedup", "loss"])
@pytest.mark.parametrize("seed", range(4))
def test_joint_savings_equal_exhaustion(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, 6])
    problem = with_joint(random_phased(rng, 3, 3, 2, 2, kind=kind), rng)
    best, solution = exhaust(problem), solve(problem, deterministic_time=10)
    assert (solution.status == "infeasible") == (best is None)
    if best is not None:
        check(problem, solution, best)


def test_a_joint_saving_of_items_that_change_at_different_phases_is_shared_half_and_half() -> None:
    choice = Choice(Format.FP8, (0.0, 0.0), 1.0)
    fprop = Item("a:fprop", 0, 10.0, (choice,))
    wgrad = Item("a:wgrad", 0, 10.0, (choice,), keeps=(1,), joint={"a:fprop": {Format.FP8: 0.5}})
    problem = Problem(Budget("loss", 1.0), (fprop, wgrad), phases=(Phase(3), Phase(4)))
    assert solve(problem).objective == pytest.approx(7 * (20 - 2 - 0.5))
    other = replace(fprop, choices=(replace(choice, format=Format.FP8_TENSOR),))
    assert solve(replace(problem, items=(other, wgrad))).objective == pytest.approx(7 * (20 - 2 - 0.25))


@pytest.mark.parametrize("seed", range(2, 22))
def test_equals_highs(seed: int) -> None:
    problem = random_of_seed(seed)
    best, solution = highs(problem), solve(problem, deterministic_time=20)
    if best is None:
        assert solution.status == "infeasible"
        return
    assert solution.gap <= (GAP if problem.budget.kind == "fp4" else 1e-2)
    check(problem, solution, best)


@pytest.mark.parametrize("seed", range(6))
def test_one_phase_is_one_map(seed: int) -> None:
    rng = np.random.default_rng([seed, 3])
    static = random_problem(rng, 40, 3, 3, rng.choice([0.02, 0.2, None]))
    fixed = ((0, 2.0**42), (7, 2.0**41))
    timed = Problem(Budget("speedup", 1.2), static.items, fixed_cost=fixed)
    for problem in (static, timed, replace(timed, budget=Budget("loss", 30.0))):
        expected = solve(problem, deterministic_time=10)
        solution = solve(replace(problem, phases=(Phase(1),)), deterministic_time=10)
        assert solution.status == expected.status
        assert solution.objective == expected.objective
        if expected.choices:
            assert solution.phases[0].choices == expected.choices


def proportional(steps: tuple[int, ...] = (300, 200), factors: tuple[float, ...] = (0.4, 0.6)) -> Problem:
    """One stage, ten items of equal cost whose late errors cost more."""
    items = tuple(
        Item(
            f"i{i}",
            0,
            1.0,
            (
                Choice(Format.FP8, (0.0,) * len(steps), 0.0),
                Choice(Format.FP4, tuple((1.0 + i) * f for f in factors), 1.0),
            ),
        )
        for i in range(10)
    )
    return Problem(fp4(0.6), items, phases=tuple(Phase(n) for n in steps))


def test_precision_is_spent_where_errors_cost_most() -> None:
    solution = solve(proportional())
    assert [phase.achieved for phase in solution.phases] == [0.8, 0.3]
    assert solution.achieved == pytest.approx(0.6)


def test_a_target_of_a_phase_is_a_floor() -> None:
    problem = proportional()
    floored = replace(problem, phases=(Phase(300), Phase(200, 0.7)))
    solution = solve(floored)
    assert solution.phases[1].achieved == 0.7
    assert solution.loss > (solve(problem).loss or 0.0)


def test_what_keeps_its_format() -> None:
    problem = proportional()
    kept = replace(problem, items=tuple(replace(item, keeps=(1,)) for item in problem.items))
    first, last = (phase.choices for phase in solve(kept).phases)
    assert first == last


def test_an_unreachable_average_says_what_is_reachable() -> None:
    for spent, kind in ((Spent(1000, 0.1), "fp4"), (Spent(1000, 1.01), "speedup")):
        rng = np.random.default_rng(5)
        problem = replace(random_phased(rng, 20, 3, 2, 3, kind=kind), spent=spent)
        problem = replace(problem, phases=tuple(Phase(p.steps) for p in problem.phases))
        asked = replace(problem, budget=replace(problem.budget, value=0.99 if kind == "fp4" else 1e3))
        fault = solve(asked).fault
        assert fault is not None
        assert fault.reachable is not None
        reached = replace(problem, budget=replace(problem.budget, value=fault.reachable))
        assert solve(reached).status in ("optimal", "feasible")
        beyond = replace(problem, budget=replace(problem.budget, value=fault.reachable * (1 + 1e-6)))
        assert solve(beyond).status == "infeasible"


def test_an_unreachable_phase_is_named() -> None:
    problem = proportional()
    pinned = replace(
        problem, items=tuple(replace(item, pin=Format.FP8) for item in problem.items[:5]) + problem.items[5:]
    )
    solution = solve(replace(pinned, budget=fp4(0.1), phases=(Phase(300), Phase(200, 0.6))))
    assert solution.status == "infeasible"
    assert "phase 1 reaches at most 0.5" in str(solution.fault)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_and_limits_give_valid_bounds(kind: str) -> None:
    problem = random_phased(np.random.default_rng(11), 30, 3, 3, 4, kind=kind, proportional=True)
    best = highs(problem)
    for one in (solve(problem, solver="greedy"), solve(problem, deterministic_time=1e-9)):
        check(problem, one, best)


def test_the_order_of_items_and_a_second_run_change_nothing() -> None:
    problem = random_phased(np.random.default_rng(4), 20, 3, 3, 3)
    first = solve(problem, deterministic_time=5)
    assert first == replace(solve(problem, deterministic_time=5), solve_seconds=first.solve_seconds)
    turned = solve(replace(problem, items=problem.items[::-1]), deterministic_time=5)
    assert [dict(p.choices) for p in turned.phases] == [dict(p.choices) for p in first.phases]


def test_costs_of_nothing() -> None:
    item = Item("i", 0, 0.0, (Choice(Format.FP8, (1.0, 2.0), 0.0), Choice(Format.FP4, (0.0, 0.0), -1.0)))
    problem = Problem(fp4(0.5), (item,), 0.02, phases=(Phase(1), Phase(1)))
    solution = solve(problem)
    assert solution.objective == 3.0  # what saves less than nothing is no choice on a stage that costs nothing
    timed = solve(replace(problem, budget=Budget("speedup", 1.0), stage_tolerance=None))
    assert timed.objective == 3.0
    assert timed.achieved == 1.0


def test_the_plan_counts_steps_from_zero_or_as_told() -> None:
    solution = solve(proportional())
    plan = solution.to_plan()
    assert [(p.begin, n) for p, n in zip(plan.phases, plan.steps, strict=True)] == [(0, 300), (300, 200)]
    later = solution.to_plan(begins=[40, 340], version=7)
    assert (later.last, later.version, later.phases[1].precision_map.version) == (540, 7, 7)
    assert later.achieved == pytest.approx(0.6)
    assert later.objective == solution.objective == pytest.approx(sum(p.loss or 0.0 for p in solution.phases))
