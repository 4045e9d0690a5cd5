"""Certified gaps, feasibility and determinism of ``solve`` for one map, against independent solvers."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.precision.budget import Budget
from snip_megatron.solver import Choice, Item, Problem, Solution, infeasibility, solve

from .oracles import (
    GAP,
    HARD,
    chosen,
    exhaust,
    feasible,
    fp4,
    hard_problem,
    highs,
    least,
    make_problem,
    random_problem,
    slowest,
    value_of,
    with_joint,
)


def check(problem: Problem, solution: Solution, best: float | None = None) -> None:
    """What holds for every solution with choices: it is feasible, and its bound and gap are true."""
    choices = chosen(problem, solution)
    assert feasible(problem, choices)
    value = value_of(problem, choices)
    assert solution.objective == pytest.approx(value, rel=1e-9, abs=1e-12 * slowest(problem, None))
    assert solution.bound <= solution.objective
    if best is None:
        return
    tiny = 1e-12 * max(abs(best), abs(least(problem)), 1e-290)
    assert solution.bound <= best + tiny
    whole = value if problem.budget.kind == "loss" else value - least(problem)
    if solution.status == "optimal":
        assert value - best <= GAP * whole + tiny


@pytest.mark.parametrize("seed", range(24))
def test_equals_highs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(1, 5))
    tolerance = rng.choice([0.02, 0.2, None])
    problem = random_problem(rng, int(rng.integers(20, 90)), int(rng.integers(2, 7)), stages, tolerance)
    if seed % 3 == 1:
        problem = replace(problem, budget=Budget("speedup", 1.2), stage_tolerance=None)
    if seed % 3 == 2:
        low, high = (sum(f(c.loss for c in item.choices) for item in problem.items) for f in (min, max))
        problem = replace(problem, budget=Budget("loss", low + 0.2 * (high - low)), stage_tolerance=None)
    solution = solve(problem)
    assert solution.status == "optimal"
    assert solution.gap <= GAP
    check(problem, solution, highs(problem))


@pytest.mark.parametrize("seed", range(12))
def test_joint_savings_equal_exhaustion(seed: int) -> None:
    rng = np.random.default_rng([seed, 5])
    problem = with_joint(random_problem(rng, 6, 3, 2, None), rng)
    losses = [max(c.loss for c in item.choices) for item in problem.items]
    budget = Budget("speedup", 1.25) if seed % 2 else Budget("loss", float(rng.uniform(0.05, 0.6)) * math.fsum(losses))
    problem = replace(problem, budget=budget)
    solution, best = solve(problem), exhaust(problem)
    assert (solution.status == "infeasible") == (best is None)
    if best is not None:
        check(problem, solution, best)
        assert solution.speedup == pytest.approx(
            slowest(problem, None) / slowest(problem, chosen(problem, solution)[0])
        )


def test_one_quantisation_for_two_gemms_decides_the_format() -> None:
    """Alone, fprop would be faster in FP8; together with wgrad, one call quantises X for both."""
    formats = (Format.BF16, Format.FP8, Format.FP8_TENSOR)
    fprop = Item("a:fprop", 0, 10.0, tuple(map(Choice, formats, [(0.0,)] * 3, [0.0, 4.0, 3.5])))
    joint = {"a:fprop": {Format.FP8: 0.5, Format.FP8_TENSOR: 1.0}}
    wgrad = Item("a:wgrad", 0, 10.0, tuple(map(Choice, formats, [(0.0,)] * 3, [0.0, 1.0, 4.0])), joint=joint)
    solution = solve(Problem(Budget("loss", 1.0), (fprop, wgrad)))
    assert set(solution.choices.values()) == {Format.FP8_TENSOR}
    assert solution.objective == pytest.approx(20 - 3.5 - 4 - 1)
    alone = solve(Problem(Budget("loss", 1.0), (fprop, replace(wgrad, joint={}))))
    assert alone.choices["a:fprop"] is Format.FP8


LOSS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 1e-12, 1e3, -1e3, 0.1, 2e-12, 1e3 + 1e-12]),
    st.floats(-1e3, 1e3),
    st.floats(-12, 3).map(lambda e: 10.0**e),
)
COST = st.one_of(st.sampled_from([0.0, 1.0, 4.0, 1e18, 3e17]), st.floats(1e-6, 1e18), st.integers(1, 50).map(float))
TARGET = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.75]), st.floats(0, 1).map(lambda share: round(share, 9)))
"""Of nine digits, as savings are: CP-SAT cannot tell a share of 1e-13 from none."""


@st.composite
def problems(draw: st.DrawFn, most_items: int = 6) -> Problem:
    """Few items, anything the contract allows of a share."""
    formats = draw(st.integers(1, 3))
    items = []
    for i in range(draw(st.integers(1, most_items))):
        cost = draw(COST)
        choices = []
        for fmt in list(Format)[: draw(st.integers(1, formats))]:
            share = round(draw(st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(-0.5, 1))), 9)
            choices.append(Choice(fmt, (draw(LOSS),), share * cost))
        pin = draw(st.sampled_from([None, None, None, *(c.format for c in choices)]))
        items.append(Item(f"i{i}", draw(st.integers(0, 2)), cost, tuple(choices), pin))
    tolerance = draw(st.one_of(st.none(), st.sampled_from([0.0, 0.02, 1.0]), st.floats(0, 1)))
    return Problem(fp4(draw(TARGET)), tuple(items), tolerance)


@st.composite
def timed(draw: st.DrawFn) -> Problem:
    """Costs and savings of few digits, budgets of a speedup or a loss."""
    base = draw(problems(most_items=5))
    items = []
    for item in base.items:
        cost = float(draw(st.integers(0, 20)))
        shares = [draw(st.sampled_from([-0.5, 0.0, 0.25, 0.5, 0.75, 1.0])) for _ in item.choices]
        choices = tuple(replace(c, saving=s * cost) for c, s in zip(item.choices, shares, strict=True))
        items.append(replace(item, cost=cost, choices=choices))
    fixed = draw(st.dictionaries(st.integers(0, 3), st.sampled_from([0.0, 1.0, 5.0]), max_size=2))
    budget = Budget("speedup", draw(st.one_of(st.sampled_from([1.0, 1.1, 2.0]), st.floats(1, 4))))
    if draw(st.booleans()):
        low, high = (math.fsum(f(c.loss for c in item.choices) for item in items) for f in (min, max))
        budget = Budget("loss", low + draw(st.floats(0, 1)) * (high - low))
    return Problem(budget, tuple(items), fixed_cost=tuple(fixed.items()))


@settings(max_examples=200, deadline=None)
@given(st.one_of(problems(), timed()))
def test_equals_exhaustion(problem: Problem) -> None:
    solution, best = solve(problem), exhaust(problem)
    if best is None:
        assert solution.status == "infeasible"
        assert not solution.choices
        assert infeasibility(problem) == solution.fault
        return
    assert infeasibility(problem) is None
    assert solution.status == "optimal"
    check(problem, solution, best)
    greedy = solve(problem, solver="greedy")
    check(problem, greedy, best)


@settings(max_examples=80, deadline=None)
@given(st.one_of(problems(most_items=4), timed()))
def test_the_highest_reachable_is_reachable(problem: Problem) -> None:
    solution = solve(problem)
    if solution.status == "infeasible" and solution.fault.reachable is not None:
        reachable, kind = solution.fault.reachable, problem.budget.kind
        assert reachable > problem.budget.value if kind == "loss" else reachable <= problem.budget.value
        assert solve(replace(problem, budget=Budget(kind, reachable))).status == "optimal"
        beyond = min(reachable * (1 + 1e-8) + 1e-8, problem.budget.value)
        if kind != "loss" and reachable + 2e-9 < beyond:
            assert solve(replace(problem, budget=Budget(kind, beyond))).status == "infeasible"


def test_the_reason_names_the_stage() -> None:
    items = make_problem([[0.0, 1.0]] * 4, [[0.0, 1.0]] * 4, [2.0] * 4, [0, 0, 1, 1], 0.9, 0.1)
    fault = infeasibility(items)
    assert (fault.stage, fault.reachable) == (0, 0.5)
    assert str(fault) == (
        "infeasible: all stages together save too little (lowest: stage 0 saves at most 0.5 of its cost); the highest"
        " reachable target is 0.5"
    )
    slow = replace(items, budget=Budget("speedup", 3.0), stage_tolerance=None, fixed_cost=((1, 1.0),))
    fault = infeasibility(slow)  # stage 1 takes 1 + 4 and saves 2 at most: 5 / 3
    assert fault.stage == 1
    assert fault.reachable == pytest.approx(5 / 3, rel=1e-9)
    fault = infeasibility(replace(items, budget=Budget("loss", -1.25), stage_tolerance=None))
    assert str(fault) == "infeasible: the smallest reachable loss is 0"


def test_only_the_slowest_stage_pays() -> None:
    """Stage 0 is twice as slow: the other one needs no low precision for the same step time."""
    base = make_problem([[0.0, 1.0]] * 8, [[0.0, 1.0]] * 8, [2.0] * 4 + [1.0] * 4, [0] * 4 + [1] * 4, 0.0)
    solution = solve(replace(base, budget=Budget("speedup", 8 / 6)))
    assert solution.loss == 2.0
    assert solution.achieved_per_stage == {0: 0.25, 1: 0.0}
    assert solution.speedup == pytest.approx(8 / 6)


# -- determinism, limits ------------------------------------------------------------------------------------------
def test_a_need_that_is_missed_by_next_to_nothing_is_missed() -> None:
    """The best choice misses the need by less than CP-SAT can tell: what comes out is feasible, and its bound true."""
    problem = make_problem([[0.0, -1.0]], [[0.0, -1e-216]], [1.0], [0], 0.0)
    solution = solve(problem)
    assert solution.choices == {"i0000": Format.BF16}
    assert solution.status == "feasible"
    check(problem, solution, 0.0)


def test_same_solution_whatever_the_order_of_items_and_run() -> None:
    problem = random_problem(np.random.default_rng(5), 60, 3, 4, 0.05)
    first = solve(problem, deterministic_time=5.0, seed=3)
    again = solve(problem, deterministic_time=5.0, seed=3)
    assert first == replace(again, solve_seconds=first.solve_seconds)
    order = np.random.default_rng(1).permutation(len(problem.items))
    shuffled = replace(problem, items=tuple(problem.items[i] for i in order))
    assert dict(solve(shuffled, deterministic_time=5.0, seed=3).choices) == dict(first.choices)


@pytest.mark.parametrize("kind", HARD)
def test_a_limit_ends_with_a_true_bound(kind: str) -> None:
    """Losses that follow savings are hard in every knapsack. The limit is one for the whole solve."""
    problem = hard_problem(kind, stages=8)
    solution = solve(problem, deterministic_time=0.4)
    assert solution.deterministic_seconds <= 1.3 * 0.4
    check(problem, solution)
    assert solution.gap < 1e-3
    hurried = solve(problem, time_limit_s=1e-9)
    assert hurried.deterministic_seconds == 0.0
    assert hurried.bound <= solution.objective


@pytest.mark.parametrize("bad", [{"time_limit_s": 0.0}, {"deterministic_time": -1.0}, {"solver": "magic"}])
def test_bad_arguments_are_named(bad: dict) -> None:
    problem = make_problem([[0.0]], [[0.0]], [1.0], [0], 0.0)
    with pytest.raises(SnipError, match=str(next(iter(bad.values())))):
        solve(problem, **bad)
