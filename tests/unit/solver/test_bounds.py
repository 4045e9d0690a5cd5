"""Relaxation, lifts and rounding: bounds that hold, picks that are feasible."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from snip_megatron.solver import Problem, solve
from snip_megatron.solver.exact import solve_exact
from snip_megatron.solver.limits import Limits
from snip_megatron.solver.relaxation import gap, relax
from snip_megatron.solver.rounding import improve, round_picks
from snip_megatron.solver.stages import lift_stages
from snip_megatron.solver.table import ChoiceTable, Ints

from .oracles import exhaust, highs, make_problem, random_problem
from .test_solve import problems

LIMITS = Limits(math.inf, math.inf, 0)


def picks_of(table: ChoiceTable, problem: Problem) -> Ints:
    choices = solve(problem).choices
    return np.array([table.formats.index(choices[name]) for name in table.ids])


@settings(max_examples=80)
@given(problems(most_items=5))
def test_the_gap_bounds_the_distance_to_the_optimum(problem: Problem) -> None:
    table, best = ChoiceTable.build(problem), exhaust(problem)
    if best is None:
        return
    relaxation = relax(table)
    assert table.feasible(relaxation.pick)
    rounded = round_picks(table, relaxation)
    largest = float(table.loss[table.allowed].max())
    for pick in (relaxation.pick, rounded, table.most_saving()):
        assert table.feasible(pick)
        assert gap(table, relaxation, pick) >= table.objective(pick) - best - 1e-15 * largest
    assert table.difference(rounded, relaxation.pick) <= 0


@pytest.mark.parametrize("seed", range(6))
def test_lifts_bound_every_solution(seed: int) -> None:
    problem = random_problem(np.random.default_rng(300 + seed), 120, 4, 6, 0.005)
    table = ChoiceTable.build(problem)
    relaxation = relax(table)
    start = round_picks(table, relaxation)
    lifts = lift_stages(table, relaxation, start, lambda part, pick: solve_exact(part, pick, LIMITS))
    optimum = picks_of(table, problem)
    binding = relaxation.stage_price > relaxation.total_price
    assert binding.any()
    assert (lifts.lift >= 0).all()
    assert (lifts.lift[~binding] == 0).all()
    assert lifts.lift.sum() > 0
    # gap(optimum) is optimum − Lagrangian bound: all lifts together are below it, and most of it here.
    assert gap(table, relaxation, optimum) >= lifts.lift.sum()
    _total, per_stage = table.savings(lifts.pick)
    assert (per_stage[binding] >= table.stage_need[binding]).all()


@pytest.mark.parametrize("seed", range(4))
def test_many_binding_stages_equal_highs(seed: int) -> None:
    """Large enough that stages are solved on their own first."""
    problem = random_problem(np.random.default_rng(500 + seed), 250, 5, 8, 0.005)
    solution = solve(problem)
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(highs(problem), rel=1e-12)


def test_improve_takes_single_changes_while_they_are_feasible() -> None:
    problem = make_problem([[0.0, 1.0], [0.0, 5.0], [0.0, 3.0]], [[0.0, 1.0]] * 3, [1.0] * 3, [0] * 3, 1 / 3)
    table = ChoiceTable.build(problem)
    assert improve(table, table.most_saving()).tolist() == [1, 0, 0]


def test_prices_are_those_of_the_linear_program() -> None:
    """Ratios 1, 2, 3, 4 per unit saved, half to be saved: the price lies at the second ratio, or just above."""
    problem = make_problem([[0.0, float(i)] for i in (1, 2, 3, 4)], [[0.0, 1.0]] * 4, [1.0] * 4, [0] * 4, 0.5)
    relaxation = relax(ChoiceTable.build(problem))
    assert relaxation.total_price == pytest.approx(2.0, rel=1e-12)
    assert relaxation.stage_price == pytest.approx([2.0], rel=1e-12)
