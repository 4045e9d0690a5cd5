"""A limit is one for the whole solve: improving cores, proofs, repairs, stages."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from snip_megatron.solver import solve
from snip_megatron.solver.core import solve_core
from snip_megatron.solver.limits import Limits
from snip_megatron.solver.table import ChoiceTable
from solver.oracles import hard_problem, make_problem


def test_a_part_spends_of_the_whole_and_cannot_have_more_than_is_left() -> None:
    whole = Limits(math.inf, 3.0, seed=0)
    part = whole.within(2.0)
    part.spend(1.5)
    assert (part.left, whole.left) == (0.5, 1.5)
    assert not part.over
    assert whole.within(2.0).left == 1.5
    part.spend(0.5)
    assert part.over
    assert not whole.over
    assert Limits(deadline=0.0, deterministic=math.inf, seed=0).over


def test_repairs_are_paid_from_the_same_limit() -> None:
    """The cheapest picks miss the need by one unit in the last place, which the first rounding does not see."""
    small = np.random.default_rng(0).uniform(1e-9, 2e-9, 20).tolist()
    savings = [[0.0, 0.5], *([0.0, s] for s in small)]
    problem = make_problem([[0.0, 1.0]] * 21, savings, [1.0] * 21, [0] * 21, 0.01)
    table = replace(ChoiceTable.build(problem), need=math.nextafter(0.5, 1.0))
    plenty = Limits(math.inf, math.inf, seed=0)
    repaired = solve_core(table, table.allowed, table.most_saving(), plenty)
    assert repaired.pick is not None
    assert (repaired.pick.sum(), repaired.optimal) == (2, True)
    assert not table.feasible(np.eye(21, dtype=int)[0])
    little = Limits(math.inf, plenty.spent / 1e6, seed=0)
    assert solve_core(table, table.allowed, table.most_saving(), little).pick is None
    assert 0 < little.spent < plenty.spent


@pytest.mark.parametrize(("kind", "stages"), [("subset sum", 1), ("inverse strongly correlated", 8)])
def test_the_whole_solve_keeps_its_deterministic_limit(kind: str, stages: int) -> None:
    """Neither proof ends within the limit, so both and all parts before them are cut by it."""
    solution = solve(hard_problem(kind, stages=stages), deterministic_time=0.4)
    assert solution.status == "feasible"
    assert 0.39 < solution.deterministic_seconds <= 1.2 * 0.4


def test_a_wall_limit_that_is_over_leaves_the_rounded_relaxation() -> None:
    solution = solve(hard_problem("proportional", stages=8), time_limit_s=1e-9)
    assert solution.status == "feasible"
    assert solution.deterministic_seconds == 0.0
