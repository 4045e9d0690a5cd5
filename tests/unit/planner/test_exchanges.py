"""Prices of exchanges in budgets of time: exact where they can be, and what the solver makes of them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snip_megatron.planner.models import load_llama
from snip_megatron.planner.plan import make_plan
from snip_megatron.planner.rates import Links
from snip_megatron.planner.request import build_problem, formats_of_map
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import Format, Gemm, dense_names, option_id, split_option_id
from snip_megatron.precision.budget import Budget
from snip_megatron.solver import Problem, Solution, solve
from snip_megatron.solver.problem import Choice, Item
from snip_megatron.timing.cost_model import CostModel, FlopsModel
from snip_megatron.timing.shapes import ALL_BF16, LinearShape

from .formula import SMALL, layout, with_blocks
from .test_plan import request

MODES = ("bf16", "gather", "all")
LINKS = Links(node_size=8, within=1e9, between=1e9)  # slow, so that exchanges count
BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4


class EqualGemms(FlopsModel):
    """A cost model in which no format makes a GEMM faster."""

    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        return super().seconds(shape, gemm, BF16)


def step_of(communication: str, model: CostModel | None = None, blocks: int = 1, **sizes: Any) -> StepModel:
    chosen = layout(
        with_blocks(SMALL, blocks), communication=communication, **({"tp": 2, "sequence_parallel": True} | sizes)
    )
    return StepModel(chosen, EqualGemms() if model is None else model, LINKS)


# -- attribution -------------------------------------------------------------------------------------------------
def test_the_step_in_bf16_is_the_same_in_every_mode_and_its_fixed_part_is_not() -> None:
    """A budget's reference contains exchanges once: in the fixed part, or in the costs of options."""
    steps = {mode: step_of(mode, blocks=2) for mode in MODES}
    reference = {mode: step.step(lambda row: ALL_BF16) for mode, step in steps.items()}
    assert [time.total for time in reference.values()] == pytest.approx([reference["bf16"].total] * 3)
    fixed = {mode: step.fixed_seconds()[0] for mode, step in steps.items()}
    assert fixed["bf16"] > fixed["gather"] > fixed["all"]
    for mode, step in steps.items():
        costs = math.fsum(item.cost for item in _problem(step, "speedup=1", "layer").items)
        assert fixed[mode] + costs == pytest.approx(reference[mode].total)


# -- the solver ----------------------------------------------------------------------------------------------------
def _problem(step: StepModel, budget: str, granularity: str, formats: str = "bf16,fp8,fp4") -> Problem:
    return build_problem(request(budget, formats, granularity=granularity), step)


def _problem_of(
    step: StepModel,
    losses: Mapping[str, Mapping[Format, float]],
    budget: Budget,
    fixed: Mapping[int, float] | None = None,
) -> Problem:
    times = step.option_times({fmt for by_format in losses.values() for fmt in by_format})

    def item(key: str) -> Item:
        linear, gemm = split_option_id(key)
        cost = times.of(str(linear), gemm, BF16)
        choices = (Choice(fmt, (loss,), cost - times.of(str(linear), gemm, fmt)) for fmt, loss in losses[key].items())
        return Item(key, 0, cost, tuple(choices))

    return Problem(budget, tuple(map(item, losses)), fixed_cost=tuple((fixed or {}).items()))


def _options(granularity: str) -> list[str]:
    gemms: Sequence[Gemm | None] = tuple(Gemm) if granularity == "gemm" else (None,)
    return [option_id(name, gemm) for name in dense_names(1) for gemm in gemms]


def _seconds(step: StepModel, solution: Solution) -> float:
    return step.step(formats_of_map(solution.to_precision_map())).total


LOSS = st.integers(0, 9).map(float)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(("gather", "all")),
    st.sampled_from((FlopsModel(), EqualGemms())),
    st.lists(st.tuples(LOSS, LOSS), min_size=4, max_size=4),
    st.integers(0, 36),
)
def test_whole_linears_are_chosen_as_by_brute_force_over_planned_steps(
    communication: str, model: CostModel, losses: list[tuple[float, float]], bound: int
) -> None:
    """At granularity ``layer`` every price is exact: no map within the bound has a shorter planned step."""
    step = step_of(communication, model)
    given_losses = {
        key: {BF16: 0.0, FP8: min(pair), FP4: max(pair)} for key, pair in zip(_options("layer"), losses, strict=True)
    }
    found = solve(_problem_of(step, given_losses, Budget("loss", float(bound))))
    best = math.inf
    for formats in itertools.product((BF16, FP8, FP4), repeat=4):
        if math.fsum(by[f] for by, f in zip(given_losses.values(), formats, strict=True)) <= bound:
            chosen = dict(zip(dense_names(1), formats, strict=True))
            best = min(best, step.step(lambda row, of=chosen: (of[row.name],) * 3).total)
    assert _seconds(step, found) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("communication", MODES)
def test_the_speedup_of_linears_in_a_plan_is_that_of_its_budget(communication: str) -> None:
    """Of one map, and as an average over phases. Between bf16 and fp8 the prices of single GEMMs are exact."""
    sizes = {"tp": 2, "sequence_parallel": True, "communication": communication}
    step = StepModel(layout(with_blocks(load_llama("8b"), 4), **sizes), FlopsModel())
    asked = request("speedup=1.4", "bf16,fp8", schedule="auto", train_iters=400)
    promised = solve(build_problem(asked, step)).speedup
    plan = make_plan(step, asked)
    assert plan["steps"]["map"]["linears_speedup"] == pytest.approx(promised, rel=1e-9)
    assert plan["phases"]["average_linears_speedup"] == pytest.approx(plan["phases"]["achieved"], rel=1e-9)
    assert plan["phases"]["achieved"] >= 1.4 * (1 - 1e-9)
