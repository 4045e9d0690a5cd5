"""A job inside the sidecar whose phases cannot reach the budget. A plan: distributed/test_phases_in_training.py."""

import json
from dataclasses import replace

from sensitivity.synthetic import make_table

from snip_megatron.precision.budget import Budget
from snip_megatron.runtime.solving import SolveJob, solve_job
from snip_megatron.sensitivity import SolveRequest
from tests.unit.sensitivity.test_problem import PHASES

TABLE = make_table(layers=2)


def job(target: float, spent: float, floor: float | None = None) -> SolveJob:
    phases = replace(
        PHASES, begins=(20, 50, 90), steps=(30, 40, 10), budgets=(None, floor, None), spent_steps=20, spent=spent
    )
    return SolveJob(
        TABLE, SolveRequest(budget=Budget("fp4", target), phases=phases, version=3, pins=(("*.1.*fc2", "bf16"),))
    )


def test_a_budget_that_is_out_of_reach_is_replaced_by_what_is_reachable() -> None:
    """20 of 100 steps saved nothing and a linear is pinned, so that 0.95 is out of reach."""
    result = solve_job(job(0.95, 0.0))
    plan, why = result.candidates[0].plan, result.out_of_reach
    assert why.startswith("the high")
    assert 0.0 < plan.target < 0.8
    assert plan.achieved >= plan.target - 1e-9
    assert json.loads(result.problem_json or "")["budget"]["target"] == plan.target


def test_a_phase_whose_own_budget_is_out_of_reach_is_named_with_its_step() -> None:
    result = solve_job(job(0.5, 0.5, floor=0.99))
    assert result.failure == "infeasible"
    assert result.message.startswith("infeasible: phase 1 reaches at most 0.")
    assert (
        "less than its own target of 0.99 (phases 0, 1, … begin at steps 20, 50, 90); lower its budget"
        in result.message
    )
