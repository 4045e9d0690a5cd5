"""``sweep``: a problem at a range of budgets."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.solver import Problem, solve, sweep
from snip_megatron.solver.pareto import cost_shares

from .oracles import GAP, fp4, make_problem, random_problem


@pytest.mark.parametrize("budget", [fp4(0.3), Budget("speedup", 1.1), Budget("loss", 1.0)])
def test_a_sweep_is_a_front_from_end_to_end(budget: Budget) -> None:
    base = random_problem(np.random.default_rng(21), 40, 3, 2, None)
    timed = {"fixed_cost": ((0, 1.0),)} if budget.timed else {"stage_tolerance": 0.02}
    problem = Problem(budget, base.items, **timed)
    front = sweep(problem, 9)
    assert [s.status for s in front] == ["optimal"] * 9
    wanted = [s.budget.value for s in front]
    assert wanted == sorted(set(wanted))
    objectives = [s.objective for s in front]
    least, most = (math.fsum(f(c.loss for c in i.choices) for i in base.items) for f in (min, max))
    if budget.kind == "loss":
        # More loss allowed, less time; at the end everything saves its most.
        assert all(b <= a * (1 + GAP) for a, b in pairwise(objectives))
        assert front[-1].loss <= most
        assert front[0].loss == pytest.approx(least, rel=1e-12)
    else:
        assert all(b >= a * (1 - GAP) for a, b in pairwise(objectives))
        assert objectives[0] == pytest.approx(least, rel=GAP)
        beyond = solve(replace(problem, budget=replace(budget, value=wanted[-1] * (1 + 1e-6))))
        assert beyond.status == "infeasible"
    alone = solve(replace(problem, budget=replace(budget, value=wanted[4])))
    assert alone.objective == pytest.approx(objectives[4], rel=5 * GAP)
    cost = {item.id: item.cost for item in problem.items}
    assert all(math.isclose(sum(cost_shares(s, cost).values()), 1.0) for s in front)


def test_nothing_to_sweep() -> None:
    problem = make_problem([[0.0]], [[-1.0]], [1.0], [0], 0.0)
    with pytest.raises(SnipError, match="nothing to sweep") as caught:
        sweep(problem, 9)
    assert caught.value.exit_code == 3
    with pytest.raises(SnipError, match="2 points"):
        sweep(problem, 1)
