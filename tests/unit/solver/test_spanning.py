"""Groups on several pipeline stages: optimal by exhaustion, and within the limits of one solve."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.solver import Budget, Choice, Item, Problem, solve
from snip_megatron.solver.pareto import reachable, sweep
from snip_megatron.solver.spanning import MOST_COMBINATIONS, spanning_groups

from .oracles import feasible, random_problem


def grouped(problem: Problem, groups: list[str | None]) -> Problem:
    return replace(problem, items=tuple(replace(i, group=g) for i, g in zip(problem.items, groups, strict=True)))


def exhaust(problem: Problem) -> float | None:
    """The smallest Σ loss where every group shares a format and every pin holds."""
    best = None
    for combination in itertools.product(*(item.choices for item in problem.items)):
        formats: dict[str, set[Format]] = {}
        for item, choice in zip(problem.items, combination, strict=True):
            formats.setdefault(item.group or f"alone {item.id}", set()).add(choice.format)
        one_each = all(len(f) == 1 for f in formats.values())
        pinned = all(i.pin in (None, c.format) for i, c in zip(problem.items, combination, strict=True))
        if one_each and pinned and feasible(problem, list(combination)):
            loss = math.fsum(c.loss for c in combination)
            best = loss if best is None else min(best, loss)
    return best


def assert_shared(problem: Problem, choices: dict[str, Format]) -> None:
    for item, other in itertools.combinations(problem.items, 2):
        if item.group is not None and item.group == other.group:
            assert choices[item.id] is choices[other.id]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tolerance", [None, 0.05])
def test_it_is_the_optimum(seed: int, tolerance: float | None) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, items=8, formats=2, stages=3, tolerance=tolerance)
    groups = [rng.choice([None, "a", "b", "c"]) for _ in problem.items]
    problem = grouped(problem, groups)
    if seed % 3 == 0:
        item = problem.items[0]
        pinned = replace(item, pin=item.choices[1].format, group="a")
        problem = replace(problem, items=(pinned, *problem.items[1:]))
    expected = exhaust(problem)
    solution = solve(problem, deterministic_time=5.0)
    if expected is None:
        assert solution.status == "infeasible"
        assert solution.fault is not None
        return
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(expected, rel=1e-9)
    assert solution.bound == pytest.approx(expected, rel=1e-9)
    assert_shared(problem, dict(solution.choices))
    greedy = solve(problem, solver="greedy")
    assert greedy.objective is not None
    assert greedy.bound is not None
    assert greedy.objective >= expected * (1 - 1e-9)
    assert greedy.bound <= expected * (1 + 1e-9)
    assert_shared(problem, dict(greedy.choices))


def two_formats(loss: float, saving: float = 1.0) -> tuple[Choice, ...]:
    return (Choice(Format.FP8, 0.0, 0.0), Choice(Format.FP4, loss, saving))


def test_a_spanning_group_counts_on_each_stage() -> None:
    """Stage 1 can meet its share by the group alone: the group must go to fp4 although it costs more."""
    items = (
        Item("a", 0, 1.0, two_formats(5.0), group="g"),
        Item("b", 1, 1.0, two_formats(5.0), group="g"),
        Item("c", 0, 1.0, two_formats(0.1)),
        Item("d", 0, 1.0, two_formats(0.1)),
    )
    free = solve(Problem(Budget(0.5), items))
    assert {k for k, f in free.choices.items() if f is Format.FP4} == {"c", "d"}
    held = solve(Problem(Budget(0.5, 0.0), items))
    assert {k for k, f in held.choices.items() if f is Format.FP4} >= {"a", "b"}
    assert held.achieved_per_stage[1] == 1.0


@pytest.mark.parametrize("kind", ["speedup", "loss"])
def test_budgets_of_time(kind: str) -> None:
    """The slowest stage decides: the group's part there is worth its loss, its other part comes along."""
    items = (
        Item("a", 0, 4.0, two_formats(1.0, 2.0), group="g"),
        Item("b", 1, 1.0, two_formats(1.0, 0.5), group="g"),
        Item("c", 0, 1.0, two_formats(9.0, 0.5)),
    )
    budget = Budget(speedup=5.0 / 3.0) if kind == "speedup" else Budget(loss=2.5)
    solution = solve(Problem(budget, items))
    assert solution.choices == {"a": Format.FP4, "b": Format.FP4, "c": Format.FP8}
    assert solution.status == "optimal"
    assert solution.loss == 2.0
    assert solution.speedup == pytest.approx(5.0 / 3.0)


def test_hints_and_penalties_reach_every_part() -> None:
    items = (Item("a", 0, 1.0, two_formats(1.0), group="g"), Item("b", 1, 1.0, two_formats(1.0), group="g"))
    problem = Problem(Budget(0.0), items)
    stays = solve(problem, hint={"a": Format.FP4, "b": Format.FP4}, change_penalty=3.0)
    assert set(stays.choices.values()) == {Format.FP4}
    assert stays.objective == 2.0
    moves = solve(problem, hint={"a": Format.FP4, "b": Format.FP4}, change_penalty=0.5)
    assert set(moves.choices.values()) == {Format.FP8}
    assert moves.objective == 1.0


def test_nothing_reachable_names_the_best_that_is() -> None:
    items = (Item("a", 0, 1.0, two_formats(1.0, 0.5), group="g"), Item("b", 1, 1.0, two_formats(1.0, 0.5), group="g"))
    solution = solve(Problem(Budget(0.9), items))
    assert solution.status == "infeasible"
    assert solution.fault is not None
    assert solution.fault.reachable == pytest.approx(0.5)
    assert reachable(Problem(Budget(0.9), items))[1] == pytest.approx(0.5)
    points = sweep(Problem(Budget(0.9), items), points=3)
    assert [p.status for p in points] == ["optimal"] * 3


def test_too_many_combinations_are_refused() -> None:
    def items(count: int) -> tuple[Item, ...]:
        return tuple(Item(f"{g} {s}", s, 1.0, two_formats(1.0), group=f"g{g}") for g in range(count) for s in range(2))

    assert len(spanning_groups(Problem(Budget(0.5), items(9)))) == 9
    with pytest.raises(
        SnipError, match=f"10 groups span pipeline stages, which is 1024 .* at most {MOST_COMBINATIONS}"
    ):
        solve(Problem(Budget(0.5), items(10)))
    pinned = tuple(replace(item, pin=Format.FP4) for item in items(10))
    assert set(solve(Problem(Budget(0.5), pinned)).choices.values()) == {Format.FP4}
