"""Speedup and loss budgets, groups, pins, the penalty of changes: against exhaustion."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.solver import Budget, Choice, Item, Problem, solve, sweep
from snip_megatron.solver.pareto import sweep_json

from .oracles import exhaust, make_problem, random_problem
from .test_solve import problems

SPEEDUPS = st.one_of(st.sampled_from([1.0, 1.1, 2.0]), st.floats(1, 4))
FIXED = st.dictionaries(st.integers(0, 3), st.sampled_from([0.0, 1.0, 5.0]), max_size=2)


def combinations(problem: Problem) -> Iterator[tuple[Choice, ...]]:
    return itertools.product(*(item.choices for item in problem.items))


def slowest(problem: Problem, choice: tuple[Choice, ...]) -> float:
    times = dict(problem.budget.fixed_cost)
    for stage in {item.stage for item in problem.items}:
        mine = [(i.cost, c.saving) for i, c in zip(problem.items, choice, strict=True) if i.stage == stage]
        times[stage] = times.get(stage, 0.0) + math.fsum(c for c, _ in mine) - math.fsum(s for _, s in mine)
    return max(times.values())


def reference(problem: Problem) -> float:
    return slowest(problem, tuple(Choice(Format.BF16, 0.0, 0.0) for _ in problem.items))


def loss_of(choice: tuple[Choice, ...]) -> float:
    return math.fsum(c.loss for c in choice)


@st.composite
def timed(draw: st.DrawFn) -> Problem:
    """Costs and savings of few digits, so that times do not differ by less than the solver's resolution."""
    problem = draw(problems(most_items=5))
    items = []
    for item in problem.items:
        cost = float(draw(st.integers(0, 20)))
        shares = [draw(st.sampled_from([-0.5, 0.0, 0.25, 0.5, 0.75, 1.0])) for _ in item.choices]
        choices = tuple(replace(c, saving=s * cost) for c, s in zip(item.choices, shares, strict=True))
        items.append(replace(item, cost=cost, choices=choices))
    return Problem(problem.budget, tuple(items))


@settings(max_examples=100)
@given(timed(), SPEEDUPS, FIXED)
def test_least_loss_at_a_speedup(base: Problem, speedup: float, fixed: dict[int, float]) -> None:
    problem = Problem(Budget(speedup=speedup, fixed_cost=tuple(fixed.items())), base.items)
    limit = reference(problem) / speedup
    good = [c for c in combinations(problem) if slowest(problem, c) <= limit * (1 + 1e-9)]
    solution = solve(problem)
    if not good:
        assert solution.status == "infeasible"
        return
    assert solution.status == "optimal"
    assert solution.speedup >= speedup * (1 - 1e-8) or limit == 0
    assert solution.objective == pytest.approx(min(map(loss_of, good)), rel=1e-14, abs=1e-12)


@settings(max_examples=100)
@given(timed(), st.floats(0, 1), FIXED)
def test_least_time_within_a_loss(base: Problem, share: float, fixed: dict[int, float]) -> None:
    losses = sorted(map(loss_of, combinations(base)))
    bound = losses[0] + share * (losses[-1] - losses[0])
    problem = Problem(Budget(loss=bound, fixed_cost=tuple(fixed.items())), base.items)
    good = [c for c in combinations(problem) if loss_of(c) <= bound]
    solution = solve(problem)
    if not good:  # the rounding of ``bound``
        assert solution.status == "infeasible"
        return
    best = min(slowest(problem, c) for c in good)
    assert solution.status == "optimal"
    assert solution.loss <= bound
    assert solution.objective == pytest.approx(best, rel=1e-8)
    assert solution.bound <= best * (1 + 1e-12)
    ties = [loss_of(c) for c in good if slowest(problem, c) <= best * (1 + 1e-9)]
    assert solution.loss == pytest.approx(min(ties), rel=1e-12, abs=1e-12)


def test_a_loss_below_all_is_infeasible_and_names_the_smallest() -> None:
    base = make_problem([[1.0, 2.0], [0.5, 4.0]], [[0.0, 1.0]] * 2, [1.0] * 2, [0, 1], 0.0)
    solution = solve(Problem(Budget(loss=1.25), base.items))
    assert solution.status == "infeasible"
    assert solution.fault.reachable == 1.5
    assert "smallest reachable loss is 1.5" in str(solution.fault)
    assert solve(Problem(Budget(loss=1.5), base.items)).loss == 1.5


def test_a_speedup_out_of_reach_names_the_stage_and_the_highest() -> None:
    items = make_problem([[0.0, 1.0]] * 4, [[0.0, 1.0]] * 4, [2.0] * 4, [0, 0, 1, 1], 0.0).items
    solution = solve(Problem(Budget(speedup=3.0, fixed_cost=((1, 1.0),)), items))
    # Stage 1 takes 1 + 4 and saves 2 at most: 5 / 3.
    assert solution.status == "infeasible"
    assert solution.fault.stage == 1
    assert solution.fault.reachable == pytest.approx(5 / 3, rel=1e-9)
    reachable = Problem(Budget(speedup=solution.fault.reachable, fixed_cost=((1, 1.0),)), items)
    assert solve(reachable).status == "optimal"


def test_only_the_slowest_stage_pays() -> None:
    """Stage 0 is twice as slow: the other one needs no low precision for the same step time."""
    problem = make_problem([[0.0, 1.0]] * 8, [[0.0, 1.0]] * 8, [2.0] * 4 + [1.0] * 4, [0] * 4 + [1] * 4, 0.0)
    solution = solve(Problem(Budget(speedup=8 / 6), problem.items))
    assert solution.loss == 2.0
    assert solution.achieved_per_stage == {0: 0.25, 1: 0.0}
    assert solution.speedup == pytest.approx(8 / 6)


def test_many_items_fastest_is_no_slower_than_any_speedup_of_equal_loss() -> None:
    base = random_problem(np.random.default_rng(11), 200, 4, 4, None)
    by_speed = solve(Problem(Budget(speedup=1.4), base.items))
    fastest = solve(Problem(Budget(loss=by_speed.loss), base.items))
    assert by_speed.status == fastest.status == "optimal"
    assert fastest.speedup >= by_speed.speedup * (1 - 1e-8)
    assert fastest.loss <= by_speed.loss
    greedy = solve(Problem(Budget(loss=by_speed.loss), base.items), solver="greedy")
    assert greedy.loss <= by_speed.loss
    assert greedy.objective >= fastest.objective * (1 - 1e-8) >= greedy.bound * (1 - 1e-8)


# -- groups and pins -----------------------------------------------------------------------------------------------
@settings(max_examples=80)
@given(problems(most_items=6), st.data())
def test_groups_and_pins_equal_exhaustion(base: Problem, data: st.DataObject) -> None:
    items = []
    for item in base.items:
        group = data.draw(st.sampled_from([None, "a", "b"]))
        pin = data.draw(st.sampled_from([None, None, *(c.format for c in item.choices)]))
        items.append(replace(item, group=group and f"{group}{item.stage}", pin=pin))
    try:
        problem = Problem(base.budget, tuple(items))
    except SnipError as error:
        assert "group" in str(error)  # noqa: PT017  members without a common format, or pinned apart
        return
    allowed = [
        combination
        for combination in combinations(problem)
        if all(i.pin in (None, c.format) for i, c in zip(items, combination, strict=True))
        and all(
            len({c.format for i, c in zip(items, combination, strict=True) if i.group == name}) <= 1
            for name in {i.group for i in items} - {None}
        )
    ]
    assert allowed
    # Exhaust over whole combinations: each becomes one choice of a problem of single choices.
    outcomes = []
    for combination in allowed:
        single = tuple(replace(i, choices=(c,), group=None, pin=None) for i, c in zip(items, combination, strict=True))
        outcomes.append(exhaust(Problem(base.budget, single)))
    feasible = [x for x in outcomes if x is not None]
    solution = solve(problem)
    if not feasible:
        assert solution.status == "infeasible"
        return
    largest = max(abs(c.loss) for item in items for c in item.choices)
    assert solution.status == "optimal"
    assert abs(solution.objective - min(feasible)) <= 1e-15 * len(items) * largest
    for item in items:
        assert item.pin in (None, solution.choices[item.id])
        assert all(solution.choices[o.id] is solution.choices[item.id] for o in items if o.group == item.group != None)  # noqa: E711


def test_group_and_pin_survive_json() -> None:
    choices = (Choice(Format.BF16, 0.0, 0.0), Choice(Format.FP4, 1.0, 1.0))
    items = (Item("a", 0, 1.0, choices, "g", Format.FP4), Item("b", 0, 1.0, choices, "g"), Item("c", 1, 1.0, choices))
    for budget in (Budget(0.5, 0.1), Budget(speedup=1.5, fixed_cost=((0, 2.0), (7, 0.5))), Budget(loss=-0.25)):
        problem = Problem(budget, items)
        assert Problem.from_json(problem.to_json()) == problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{"group": "g", "pin": Format.BF16}, {"group": "g", "pin": Format.FP4}], "pinned to bf16 and fp4"),
        ([{"pin": Format.FP8}, {}], "items[0].pin: 'fp8' is not among"),
        ([{}, {"group": ""}], "items[1].group"),
        ([{"group": "g", "choices": (Choice(Format.FP8, 0.0, 0.0),)}, {"group": "g"}], "no format in common"),
    ],
)
def test_bad_groups_and_pins(changes: list[dict], words: str) -> None:
    choices = (Choice(Format.BF16, 0.0, 0.0), Choice(Format.FP4, 1.0, 1.0))
    items = [replace(Item(name, 0, 1.0, choices), **c) for name, c in zip("ab", changes, strict=True)]
    with pytest.raises(SnipError) as caught:
        Problem(Budget(0.5), tuple(items))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget(), "exactly one of target, speedup, loss, has none"),
        (Budget(0.5, speedup=1.2), "has target and speedup"),
        (Budget(speedup=0.9), "budget.speedup"),
        (Budget(speedup=math.nan), "budget.speedup"),
        (Budget(loss=math.inf), "budget.loss"),
        (Budget(loss=0.1, stage_tolerance=0.02), "budget.stage_tolerance"),
        (Budget(0.5, fixed_cost=((0, 1.0),)), "budget.fixed_cost"),
        (Budget(speedup=1.2, fixed_cost=((0, -1.0),)), "budget.fixed_cost.0"),
    ],
)
def test_bad_budgets(budget: Budget, words: str) -> None:
    with pytest.raises(SnipError) as caught:
        Problem(budget, (Item("a", 0, 1.0, (Choice(Format.BF16, 0.0, 0.0),)),))
    assert words in str(caught.value)


# -- stability -----------------------------------------------------------------------------------------------------
def test_a_penalty_keeps_choices_that_hardly_matter() -> None:
    n = 20
    rng = np.random.default_rng(3)
    base = [[0.0, float(x)] for x in rng.uniform(1, 2, n)]
    old = solve(make_problem(base, [[0.0, 1.0]] * n, [1.0] * n, [0] * n, 0.5))
    moved = [[0.0, x * (1 + 0.02 * rng.normal())] for _, x in base]
    moved[0][1] = 0.1 if old.choices["i0000"] is Format.BF16 else 50.0  # one that does matter
    problem = make_problem(moved, [[0.0, 1.0]] * n, [1.0] * n, [0] * n, 0.5)
    free = solve(problem, hint=old.choices)
    steady = solve(problem, hint=old.choices, change_penalty=0.1)
    assert free.objective == solve(problem).objective
    changed = [sum(s.choices[i] is not f for i, f in old.choices.items()) for s in (free, steady)]
    assert changed[1] == 2  # the one that matters, and one to make up for it
    assert changed[0] >= changed[1]
    assert steady.loss >= free.loss
    assert steady.objective == pytest.approx(steady.loss + 0.1 * changed[1], rel=1e-14)
    assert steady.status == "optimal"
    with pytest.raises(SnipError, match="change_penalty"):
        solve(problem, change_penalty=-1.0)
    with pytest.raises(SnipError, match="no meaning under a loss budget"):
        solve(Problem(Budget(loss=1.0), problem.items), hint=old.choices, change_penalty=0.1)


# -- sweep ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [Budget(0.3, 0.02), Budget(speedup=1.1, fixed_cost=((0, 1.0),)), Budget(loss=1.0)])
def test_a_sweep_is_a_front_from_end_to_end(budget: Budget) -> None:
    base = random_problem(np.random.default_rng(21), 40, 3, 2, None)
    problem = Problem(budget, base.items)
    front = sweep(problem, 9)
    assert [s.status for s in front] == ["optimal"] * 9
    wanted = [s.target for s in front]
    assert wanted == sorted(set(wanted))
    objectives = [s.objective for s in front]
    least, most = (math.fsum(f(c.loss for c in i.choices) for i in base.items) for f in (min, max))
    if budget.kind == "loss":
        # More loss allowed, less time; at the end everything saves its most.
        assert objectives == sorted(objectives, reverse=True)
        assert front[-1].loss <= most
        assert front[0].loss == pytest.approx(least, rel=1e-12)
    else:
        assert objectives == sorted(objectives)
        assert objectives[0] == pytest.approx(least, rel=1e-12)
        beyond = solve(Problem(replace(budget, **{budget.kind: wanted[-1] * (1 + 1e-6)}), base.items))
        assert beyond.status == "infeasible"
    alone = solve(Problem(replace(budget, **{budget.kind: wanted[4]}), base.items))
    assert alone.objective == pytest.approx(objectives[4], rel=1e-8)
    body = json.loads(sweep_json(problem, front))
    assert body["schema"] == "snip.sweep/1"
    assert [p["budget"] for p in body["points"]] == wanted
    assert all(math.isclose(sum(p["cost_share"].values()), 1.0) for p in body["points"])


def test_nothing_to_sweep() -> None:
    problem = make_problem([[0.0]], [[-1.0]], [1.0], [0], 0.0)
    with pytest.raises(SnipError, match="nothing to sweep") as caught:
        sweep(problem)
    assert caught.value.exit_code == 3
    with pytest.raises(SnipError, match="2 points"):
        sweep(problem, 1)
