"""A job with phases inside the sidecar: a plan within the budget over the run, or within what is still reachable."""

import json

import pytest
from sensitivity.synthetic import make_table

from snip_megatron.precision import fp4_fraction
from snip_megatron.precision.budget import Budget
from snip_megatron.runtime.solving import SolveJob, solve_job
from snip_megatron.sensitivity import SolveRequest
from snip_megatron.sensitivity.request import PhasedRequest

TABLE = make_table(layers=2)
FLOPS = {row.name: row.flops for row in TABLE.linears}


def job(target: float, spent_steps: int, spent: float, floor: float | None = None) -> SolveJob:
    phases = PhasedRequest(
        begins=(20, 50, 90),
        steps=(30, 40, 10),
        budgets=(None, floor, None),
        change=(None,) * 3,
        standing=(0.0, 0.0, 1.0),
        carried=(0.3, 0.3, 0.02),
        spent_steps=spent_steps,
        spent=spent,
    )
    return SolveJob(
        TABLE, SolveRequest(budget=Budget("fp4", target), phases=phases, version=3, pins=(("*.1.*fc2", "bf16"),))
    )


def test_a_plan_meets_the_average_with_what_was_spent() -> None:
    result = solve_job(job(0.7, 20, 0.5))
    assert result.failure is None
    (candidate,) = result.candidates
    plan = candidate.plan
    assert ([phase.begin for phase in plan.phases], plan.last, plan.version) == ([20, 50, 90], 100, 3)
    assert (plan.status, plan.target, result.out_of_reach) == ("optimal", 0.7, None)
    shares = [fp4_fraction(phase.precision_map, FLOPS) for phase in plan.phases]
    average = (20 * 0.5 + sum(n * share for n, share in zip(plan.steps, shares, strict=True))) / 100
    assert average >= 0.7
    assert plan.achieved == pytest.approx(average)
    assert json.loads(result.problem_json or "")["schema"] == "snip.problem/2"
    assert candidate.precision_map == plan.phases[0].precision_map


def test_a_budget_that_is_out_of_reach_is_replaced_by_what_is_reachable() -> None:
    """Twenty of 100 steps at nothing, and a pin: 0.95 cannot be reached any more."""
    result = solve_job(job(0.95, 20, 0.0))
    plan, why = result.candidates[0].plan, result.out_of_reach
    assert why.startswith("the high")
    assert 0.0 < plan.target < 0.8
    assert plan.achieved >= plan.target - 1e-9
    assert json.loads(result.problem_json or "")["budget"]["target"] == plan.target


def test_a_phase_whose_own_budget_is_out_of_reach_is_named_with_its_step() -> None:
    result = solve_job(job(0.5, 20, 0.5, floor=0.99))
    assert result.failure == "infeasible"
    assert result.message.startswith("infeasible: phase 1 reaches at most 0.")
    assert (
        "less than its own target of 0.99 (phases 0, 1, … begin at steps 20, 50, 90); lower its budget"
        in result.message
    )
