"""The Problem: costs, savings, pins, the fp4 share's denominator, ties, variants of formats, phases."""

import dataclasses
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.precision import Format, Gemm, split_option_id
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity import SolveRequest, build_problem
from snip_megatron.sensitivity.policies import POLICIES, UNSOLVED
from snip_megatron.sensitivity.problem import check_reachable, list_options
from snip_megatron.sensitivity.request import PhasedRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.solver import Spent, solve
from snip_megatron.solver.problem import Item, Problem

from .synthetic import linear_rows, make_table, with_columns, with_experts

SOLVED = [p for p in POLICIES if p not in UNSOLVED]


def four_bit_losses(problem: Problem) -> dict[str, float]:
    """Item id → loss of its fp4 choice."""
    return {i.id: c.loss for i in problem.items for c in i.choices if c.format is Format.FP4}


def by_id(problem: Problem) -> dict[str, Item]:
    return {item.id: item for item in problem.items}


def test_items_costs_and_savings() -> None:
    table = make_table(layers=2, stages=2)
    problem, scores = build_problem(table, SolveRequest(estimator="noise"))
    assert [i.id for i in problem.items[:4]] == [
        "decoder.layers.0.self_attention.linear_qkv:fprop",
        "decoder.layers.0.self_attention.linear_qkv:dgrad",
        "decoder.layers.0.self_attention.linear_qkv:wgrad",
        "decoder.layers.0.self_attention.linear_proj:fprop",
    ]
    assert len(problem.items) == 24
    first = problem.items[0]
    assert first.cost == 2 * 4096 * 192 * 64
    assert [(c.format, c.saving) for c in first.choices] == [(Format.FP8, 0.0), (Format.FP4, first.cost)]
    assert {i.stage for i in problem.items if i.id.startswith("decoder.layers.1.")} == {1}
    assert problem.budget.value == 0.75
    assert problem.stage_tolerance == 0.02
    for item in problem.items:
        for choice in item.choices:
            assert choice.loss == scores[item.id][choice.format.value]["q"]
    assert scores[problem.items[0].id]["fp4"]["delta_loss"] == 512 * table.by_format["c2"][0, 1]
    assert all(scores[i.id]["fp4"]["delta_weight"] > 0 for i in problem.items)


@pytest.mark.parametrize("granularity", ["gemm", "layer"])
@pytest.mark.parametrize("policy", SOLVED)
def test_scores_are_rounded_and_monotone(policy: str, granularity: str) -> None:
    table = make_table(layers=6)
    problem, _ = build_problem(table, SolveRequest(policy=policy, granularity=granularity))
    losses = [c.loss for i in problem.items for c in i.choices]
    assert all(float(f"{x:.3e}") == x for x in losses)
    for item in problem.items:
        fp8, fp4 = (c.loss for c in item.choices)
        assert 0 <= fp8 <= fp4


def test_ties_have_one_seeded_order_for_all_policies() -> None:
    table = make_table(layers=4)
    orders = {}
    for policy in ("fisher", "backward-first"):
        for seed in (1, 2):
            problem, _ = build_problem(table, SolveRequest(policy=policy, seed=seed))
            losses, items = four_bit_losses(problem), by_id(problem)
            per_flop = {key: loss / items[key].cost for key, loss in losses.items() if not key.endswith(":fprop")}
            orders[policy, seed] = sorted(per_flop, key=per_flop.__getitem__)
            assert all(b > a * (1 + 1e-6) for a, b in itertools.pairwise(sorted(per_flop.values())))
    assert orders["fisher", 1] == orders["backward-first", 1]
    assert orders["fisher", 2] == orders["backward-first", 2]
    assert orders["fisher", 1] != orders["fisher", 2]


# -- pins and the denominator of the fp4 share ---------------------------------------------------------------------
def test_pins_leave_one_choice_and_stay_in_the_denominator() -> None:
    request = SolveRequest(pins=(("decoder.layers.1.*", "bf16"), ("*.1.mlp.linear_fc2:wgrad", "fp4")))
    free, _ = build_problem(make_table(), SolveRequest())
    problem, _ = build_problem(make_table(), request)
    assert [i.cost for i in problem.items] == [i.cost for i in free.items]
    items = by_id(problem)
    assert [(c.format, c.saving) for c in items["decoder.layers.1.mlp.linear_fc1:fprop"].choices] == [
        (Format.BF16, 0.0)
    ]
    (choice,) = items["decoder.layers.1.mlp.linear_fc2:wgrad"].choices
    assert choice.format is Format.FP4
    assert choice.saving == items["decoder.layers.1.mlp.linear_fc2:wgrad"].cost
    assert len(items["decoder.layers.0.mlp.linear_fc1:fprop"].choices) == 2


def test_experts_cost_what_a_token_goes_through() -> None:
    table = make_table(layers=2)
    dense, _ = build_problem(table, SolveRequest())
    mixed, _ = build_problem(with_experts(table, experts=8, active=2), SolveRequest())
    for dense_item, mixed_item in zip(dense.items, mixed.items, strict=True):
        assert mixed_item.cost == dense_item.cost * (2 if ".experts." in mixed_item.id else 1)
        assert mixed_item.choices[1].saving == mixed_item.cost
    assert sum(".experts." in item.id for item in mixed.items) == 6


def test_unquantised_flops_count_in_the_denominator() -> None:
    """Σ cost is all of the decoder's FLOPs, overall and on every stage, and no saving grows with it."""
    table = make_table(layers=4, stages=2)
    plain, _ = build_problem(table, SolveRequest())
    stage_flops = {s: sum(i.cost for i in plain.items if i.stage == s) for s in (0, 1)}
    request = SolveRequest(unquantised_stage_flops={1: 0.5 * stage_flops[1]})
    problem, _ = build_problem(table, request)
    for stage, factor in ((0, 1.0), (1, 1.5)):
        assert math.isclose(sum(i.cost for i in problem.items if i.stage == stage), factor * stage_flops[stage])
    assert [i.choices[1].saving for i in problem.items] == [i.cost for i in plain.items]
    part = list_options(table.linears, request.of_step(0.25), 250)  # a batch that ramps up: in proportion
    full = list_options(table.linears, request, 1000)
    assert [o.cost for o in part] == pytest.approx([o.cost / 4 for o in full], rel=1e-12)
    elsewhere, _ = build_problem(table, SolveRequest(unquantised_stage_flops={7: sum(stage_flops.values())}))
    assert math.isclose(sum(i.cost for i in elsewhere.items), 2 * sum(stage_flops.values()))


def test_a_stage_limits_the_budget() -> None:
    rows = linear_rows(2, stages=2)
    request = SolveRequest(pins=(("decoder.layers.1.*:fprop", "bf16"),), stage_tolerance=0.1, budget=Budget("fp4", 0.8))
    with pytest.raises(SnipError, match=r"fp4=0\.8 is unreachable .* stage 1 saves at most 0\.666.* is 0\.7666"):
        check_reachable(rows, request)
    check_reachable(rows, replace(request, budget=Budget("fp4", 0.7666)))
    check_reachable(rows, replace(request, stage_tolerance=None))


@given(st.integers(1, 6), st.integers(0, 5), st.floats(0.0, 3.0), st.sampled_from(["gemm", "layer"]))
def test_the_reachable_share_is_reached_by_all_four_bits(
    layers: int, pinned: int, extra: float, granularity: str
) -> None:
    table = make_table(layers=layers)
    flops = sum(6.0 * table.tokens_per_step * r.n * r.k for r in table.linears)
    pins = (("decoder.layers.0.mlp.*", "bf16"),) if pinned else ()
    request = SolveRequest(
        pins=pins,
        unquantised_stage_flops={0: extra * flops},
        granularity=granularity,
        stage_tolerance=None,
        policy="random",
    )
    problem, _ = build_problem(table, request)
    best = sum(max(c.saving for c in i.choices) for i in problem.items) / sum(i.cost for i in problem.items)
    tokens, rows = table.tokens_per_step, table.linears
    check_reachable(rows, replace(request, budget=Budget("fp4", 0.9999 * best)), tokens_per_step=tokens)
    if best < 0.999:
        with pytest.raises(SnipError, match="is unreachable"):
            check_reachable(rows, replace(request, budget=Budget("fp4", 1.0001 * best)), tokens_per_step=tokens)


# -- refusals --------------------------------------------------------------------------------------------------
def test_a_table_with_a_nan_drops_the_update() -> None:
    broken = with_columns(make_table(), "linear", g2=np.array([1.0, np.nan, *[1.0] * 6]))
    with pytest.raises(SnipError, match=r"step 7 are not finite: linear\.g2 at decoder\.layers\.0\.\w+\.linear_proj"):
        build_problem(broken, SolveRequest())


FORMATS = ("mxfp8", "nvfp4_46", "nvfp4_hadamard", "nvfp4")


def table_of(formats: tuple[str, ...] = FORMATS, **relative: float) -> StatisticsTable:
    """Errors of a format are ``relative`` times those of nvfp4, or .01 times for mxfp8."""
    table = make_table(formats=formats)
    base = table.by_format["c2"][:, :1] / 1e-2
    factors = [relative.get(fmt, 0.01 if fmt == "mxfp8" else 1.0) for fmt in formats]
    return with_columns(table, "by_format", **dict.fromkeys(table.by_format, base * factors))


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in UNSOLVED])
def test_an_option_may_take_the_formats_of_its_gemm(policy: str) -> None:
    problem, scores = build_problem(table_of(), SolveRequest(formats=FORMATS, policy=policy))
    expected = {
        Gemm.FPROP: ["mxfp8", "nvfp4_46", "nvfp4"],
        Gemm.DGRAD: ["mxfp8", "nvfp4"],
        Gemm.WGRAD: ["mxfp8", "nvfp4_hadamard", "nvfp4"],
    }
    for item in problem.items:
        gemm = split_option_id(item.id)[1]
        assert gemm is not None
        assert [c.format.value for c in item.choices] == expected[gemm]
        assert list(scores[item.id]) == expected[gemm]
        assert [c.saving for c in item.choices] == [0.0] + [item.cost] * (len(expected[gemm]) - 1)


def test_candidates_that_only_one_gemm_may_take_save_that_gemms_share() -> None:
    request = SolveRequest(formats=("mxfp8", "nvfp4_46"), budget=Budget("fp4", 0.3))
    rows = linear_rows(2)
    check_reachable(rows, request)
    with pytest.raises(SnipError, match=r"the highest reachable target is 0.3333"):
        check_reachable(rows, dataclasses.replace(request, budget=Budget("fp4", 0.5)))
    solution = solve(build_problem(table_of(("mxfp8", "nvfp4_46")), request)[0])
    assert {fmt for key, fmt in solution.choices.items() if not key.endswith(":fprop")} == {Format.MXFP8}


PHASES = PhasedRequest(
    begins=(100, 400, 460), steps=(300, 60, 40), budgets=(None, None, 0.3), change=(None, None, ("*:fprop",)),
    standing=(0.0, 0.0, 1.0), carried=(0.5, 0.2, 0.1), spent_steps=100, spent=0.9,
)  # fmt: skip
REQUEST = SolveRequest(budget=Budget("fp4", 0.8), phases=PHASES, standing_share=0.75)


def phased_problem(**changes: Any) -> Problem:
    return build_problem(make_table(layers=2, stages=2), replace(REQUEST, **changes))[0]


def test_losses_by_gemm_and_phase() -> None:
    table = make_table(layers=2, stages=2)
    static, scores = build_problem(table, replace(REQUEST, phases=None))
    problem, phased_scores = build_problem(table, REQUEST)
    assert phased_scores == scores
    for item, plain in zip(problem.items, static.items, strict=True):
        assert (item.id, item.stage, item.cost) == (plain.id, plain.stage, plain.cost)
        share = 0.75 if item.id.endswith(":fprop") else 0.0
        weights = [share * s + (1 - share) * c for s, c in zip(PHASES.standing, PHASES.carried, strict=True)]
        for choice, static_choice in zip(item.choices, plain.choices, strict=True):
            assert (choice.format, choice.saving) == (static_choice.format, static_choice.saving)
            assert choice.losses == pytest.approx([static_choice.loss * w for w in weights], rel=1e-12)


def test_budget_spent_and_what_keeps_its_format() -> None:
    problem = phased_problem()
    assert problem.budget == REQUEST.budget
    assert [(p.steps, p.target) for p in problem.phases] == [(300, None), (60, None), (40, 0.3)]
    assert problem.spent == Spent(100, 0.9)
    assert {item.keeps for item in problem.items if item.id.endswith(":fprop")} == {()}
    assert {item.keeps for item in problem.items if not item.id.endswith(":fprop")} == {(2,)}
    assert phased_problem(phases=replace(PHASES, spent_steps=0)).spent is None
