"""The problem over phases: losses by phase, what keeps its format, what is spent, and that it solves."""

from dataclasses import replace
from typing import Any

import pytest

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity import SolveRequest, build_problem
from snip_megatron.sensitivity.request import PhasedRequest
from snip_megatron.solver import Item, Problem, Spent, solve

from .synthetic import make_table

PHASES = PhasedRequest(
    begins=(100, 400, 460),
    steps=(300, 60, 40),
    budgets=(None, None, 0.3),
    change=(None, None, ("*:fprop",)),
    standing=(0.0, 0.0, 1.0),
    carried=(0.5, 0.2, 0.1),
    spent_steps=100,
    spent=0.9,
)
REQUEST = SolveRequest(budget=Budget("fp4", 0.8), phases=PHASES, standing_share=0.75)


def built(**changes: Any) -> Problem:
    return build_problem(make_table(layers=2, stages=2), replace(REQUEST, **changes))[0]


def losses(item: Item) -> tuple[float, ...]:
    return item.choices[-1].losses


def test_losses_by_gemm_and_phase() -> None:
    table = make_table(layers=2, stages=2)
    static, scores = build_problem(table, replace(REQUEST, phases=None))
    problem, phased_scores = build_problem(table, REQUEST)
    assert phased_scores == scores
    for item, plain in zip(problem.items, static.items, strict=True):
        assert (item.id, item.stage, item.cost) == (plain.id, plain.stage, plain.cost)
        share = 0.75 if item.id.endswith(":fprop") else 0.0
        weights = [share * s + (1 - share) * c for s, c in zip(PHASES.standing, PHASES.carried, strict=True)]
        for choice, one in zip(item.choices, plain.choices, strict=True):
            assert (choice.format, choice.saving) == (one.format, one.saving)
            assert choice.losses == pytest.approx([one.loss * w for w in weights], rel=1e-12)


def test_budget_spent_and_what_keeps_its_format() -> None:
    problem = built()
    assert problem.budget == REQUEST.budget
    assert [(p.steps, p.target) for p in problem.phases] == [(300, None), (60, None), (40, 0.3)]
    assert problem.spent == Spent(100, 0.9)
    assert {item.keeps for item in problem.items if item.id.endswith(":fprop")} == {()}
    assert {item.keeps for item in problem.items if not item.id.endswith(":fprop")} == {(2,)}
    assert built(phases=replace(PHASES, spent_steps=0)).spent is None


def test_without_a_weight_nothing_stands() -> None:
    problem = built(phases=replace(PHASES, standing=(0.0, 0.0, 0.0)))
    for item in problem.items:
        first, _, last = losses(item)
        assert last == pytest.approx(first * 0.1 / 0.5, rel=1e-12)


def test_a_linear_stands_by_the_part_of_its_fprop() -> None:
    """At granularity layer the three GEMMs of a linear share a format and add up their losses."""
    table = make_table(layers=2, stages=2)
    request = replace(REQUEST, granularity="layer", phases=replace(PHASES, change=(None, None, None)))
    whole = build_problem(table, request)[0]
    single = build_problem(table, replace(request, granularity="gemm"))[0]
    for item in whole.items:
        gemms = [losses(other) for other in single.items if other.id.startswith(f"{item.id}:")]
        assert losses(item) == pytest.approx([sum(p) for p in zip(*gemms, strict=True)], rel=5e-3)  # 4 digits each


def test_a_late_switch_of_fprops_is_what_comes_out() -> None:
    solution = solve(built(), deterministic_time=5)
    assert solution.status == "optimal"
    assert solution.achieved >= 0.8 * (1 - 1e-9)
    first, _, last = (phase.choices for phase in solution.phases)
    assert sum(f.bits == 4 for name, f in first.items() if name.endswith(":fprop")) > sum(
        f.bits == 4 for name, f in last.items() if name.endswith(":fprop")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"phases": replace(PHASES, change=(None, ("*:fprop", "*nothing*"), None))},
            r"begins at step 400: change '\*nothing\*' matches no option; the first option is decoder.layers.0",
        ),
        ({"phases": replace(PHASES, budgets=(None, None, 1.5))}, r"phases\[2\].target: must be a share"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SnipError, match=message):
        built(**changes)
